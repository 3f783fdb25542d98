# Runs in: the host.
"""Finds what of a model, a dataset and the script's functions has changed since the runners began."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from accelmgr import _native
from accelmgr._changes.grown_buffers import Forms
from accelmgr._changes.kept_attributes import are_kept
from accelmgr._host.reached import PLAIN, Reached, has_content, holds_values, is_numpy, is_seen_by_all

IGNORED = frozenset({"training", "_compiled_call_impl"})
"""Attributes of a module that change no number, or of which runners hear in another way."""
MOST_TOLD_BYTES = 1 << 26
"""Runners are told of the content of changed tensors as far as this. For more, others are forked: the record keeps two
publications, which take memory."""


def is_simple(value: Any) -> bool:
    """Whether runners can be told of it in a record: a number, a text, a tensor, a tuple of these."""
    if isinstance(value, tuple):
        return type(value) is tuple and len(value) < 100 and all(map(is_simple, value))
    if isinstance(value, torch.Tensor):
        return type(value) is torch.Tensor
    return isinstance(value, PLAIN) or is_numpy(value, "generic")


def _state_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Version and content, as far as the tensor has them."""
    version = 0 if tensor.is_inference() or is_seen_by_all(tensor) else tensor._version
    return version, _native.digest(tensor) if has_content(tensor) else 0


def _form_of(tensor: torch.Tensor) -> tuple[torch.dtype, torch.Size]:
    return tensor.dtype, tensor.shape


@dataclasses.dataclass
class Found:
    """What has changed."""

    attributes: dict[tuple[str, str], Any] = dataclasses.field(default_factory=dict)
    """Attributes with simple values, by path of the module and name."""
    tensors: dict[int, torch.Tensor] = dataclasses.field(default_factory=dict)
    """Tensors with another content, by their numbers in `told`."""
    others: list[str] = dataclasses.field(default_factory=list)
    """What runners learn only if they begin anew, in words."""


class _Told(NamedTuple):
    """A tensor of which runners can be told."""

    number: int
    tensor: torch.Tensor
    form: tuple[torch.dtype, torch.Size]
    """As runners have it."""


class Watch:
    def __init__(
        self,
        model: torch.nn.Module | None,
        others: dict[str, Any],
        kept: Forms | None = None,
        forks: bool = False,
        told: Sequence[torch.Tensor] = (),
    ) -> None:
        """others: dataset, collate_fn and the like, by name. kept: forms of attributes of modules. While an attribute
        has this form, it is told as buffers are. forks: runners are forks, in which tensors in the memory of parameters
        are so as well, and which know the modules of the script's project as they are now. told: tensors that runners
        know by their numbers."""
        self._kept = kept or {}
        self._reached = Reached(model, others, forks)
        self._tensors: dict[tuple[str, str], tuple[torch.Tensor, tuple[int, int]]] = {}
        """Attributes of modules that are tensors, with their states."""
        for path, name, tensor in self._reached.attributes:
            self._note_tensor(path, name, tensor)
        of_runners = set(map(id, self._reached.of_runners))
        self._told = {
            id(tensor): _Told(number, tensor, _form_of(tensor))
            for number, tensor in enumerate(told)
            if id(tensor) in of_runners
        }

    @property
    def of_runners(self) -> list[torch.Tensor]:
        """Tensors of which later forks can be told."""
        return self._reached.of_runners

    def __len__(self) -> int:
        return len(self._reached.snapshot)

    def changes(self) -> Found:
        """What has changed since the last call."""
        found, reached = Found(), self._reached
        for index in reached.snapshot.changed():
            told = self._told.get(id(reached.tensors.get(index)))
            if index in reached.modules:
                self._compare_module(index, *reached.modules[index], found)
            elif index in reached.containers and holds_values(reached.containers[index][2]):
                path, name, value = reached.containers[index]
                found.attributes[path, name] = value
                reached.snapshot.note(index)
            elif told is not None and _form_of(told.tensor) == told.form:
                found.tensors[told.number] = told.tensor
                reached.snapshot.note(index)
            else:
                found.others.append(reached.names[index])
        if sum(tensor.nbytes for tensor in found.tensors.values()) > MOST_TOLD_BYTES:
            found.others.append("a large tensor")
        for (path, name), (tensor, state) in self._tensors.items():
            if (now := _state_of(tensor)) != state:
                self._tensors[path, name] = tensor, now
                found.attributes[path, name] = tensor
        return found

    def _compare_module(self, index: int, path: str, module: torch.nn.Module, found: Found) -> None:
        others = len(found.others)
        flat = self._reached.snapshot.before(index)
        before, now = dict(zip(flat[::2], flat[1::2], strict=True)), vars(module)
        for name in {**before, **now}:
            is_there = name in before and name in now
            if name in IGNORED or (is_there and before[name] is now[name]):
                continue
            if name in now and self._is_kept(path, name, now[name]):
                self._tensors.pop((path, name), None)
            elif name in now and is_simple(now[name]) and is_simple(before.get(name)):
                if not isinstance(now[name], torch.Tensor) and is_there and _equal(before[name], now[name]):
                    continue
                found.attributes[path, name] = now[name]
                self._note_tensor(path, name, now[name])
            else:
                found.others.append(f"attribute '{name}' of '{path or 'model'}'")
        if len(found.others) == others:  # Otherwise runners do not know it yet.
            self._reached.snapshot.note(index)

    def _is_kept(self, path: str, name: str, value: Any) -> bool:
        return bool(self._kept) and are_kept(value, f"{path}.{name}" if path else name, self._kept)

    def _note_tensor(self, path: str, name: str, value: Any) -> None:
        self._tensors.pop((path, name), None)
        if self._is_kept(path, name, value):
            return
        if isinstance(value, torch.Tensor) and id(value) not in self._reached.known:
            self._tensors[path, name] = value, _state_of(value)


def _equal(one: Any, other: Any) -> bool:
    try:
        return type(one) is type(other) and bool(one == other)
    except Exception:  # Tensors in tuples raise.
        return False
