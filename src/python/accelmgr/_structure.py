"""What a model is made of, and what of it the host changes after the start.

Parameters are the session's memory, so writing them in place is enough. All else of a model that a step depends on
travels as buffers: the buffers themselves, and `<modes>`, one byte for each module (in training mode?) and for each
parameter (requires a gradient?).
"""

from __future__ import annotations

import itertools
import operator
from typing import Any, TypeGuard

import torch

from accelmgr.errors import ModelError

MODES = "<modes>"
"""The name of a buffer that is none of the model's."""


def _listed(names: list[str]) -> str:
    return ", ".join(f"'{name}'" for name in names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _alike(one: torch.Tensor | None, other: torch.Tensor) -> TypeGuard[torch.Tensor]:
    return one is not None and one.shape == other.shape and one.dtype == other.dtype


class Structure:
    """The modules and parameters of `model` as they were when this was made."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self.parameters = list(model.parameters())
        self._names = {name: parameter for name, parameter in model.named_parameters(remove_duplicate=False)}
        self._switched = list(model.modules())
        self._look()

    def _look(self) -> None:
        # A module keeps these dictionaries for good. Comparing what they hold is cheap enough for every step.
        self._dictionaries: list[dict[str, Any]] = [
            entries
            for module in self._model.modules()
            for entries in (module._modules, module._parameters)
            if isinstance(entries, dict)
        ]
        self._found = list(itertools.chain.from_iterable(map(dict.values, self._dictionaries)))

    def check(self) -> None:
        """Raises ModelError unless the model has the parameters that it had, each of them the same object."""
        now = itertools.chain.from_iterable(map(dict.values, self._dictionaries))
        if sum(map(len, self._dictionaries)) == len(self._found) and all(map(operator.is_, now, self._found)):
            return
        names = dict(self._model.named_parameters(remove_duplicate=False))
        gone = [name for name in self._names if name not in names]
        new = [name for name in names if name not in self._names]
        replaced = [name for name, was in self._names.items() if names.get(name, was) is not was]
        for what, found in (("replaced", replaced), ("added", new), ("removed", gone)):
            if found:
                raise ModelError(
                    f"after the start {_listed(found)} of the model {'was' if len(found) == 1 else 'were'} {what}: "
                    "runners compute with the parameters that the manager was started with. Change these in place "
                    "(load_state_dict() without assign=True, or copy_() under torch.no_grad()), or start another "
                    "manager for the changed model"
                )
        self._look()  # Modules without parameters came or went.

    @property
    def modes(self) -> bytes:
        """One byte for each module, then for each parameter."""
        return bytes([module.training for module in self._switched] + [p.requires_grad for p in self.parameters])

    def follow(self, modes: bytes, before: bytes) -> None:
        """Sets what differs from `before`: what the model itself has switched meanwhile stays."""
        count = len(self._switched)
        for module, on, was in zip(self._switched, modes[:count], before[:count], strict=True):
            if on != was:
                module.training = bool(on)
        for parameter, on, was in zip(self.parameters, modes[count:], before[count:], strict=True):
            if on != was:
                parameter.requires_grad_(bool(on))


class Buffers:
    """The buffers of a model, each once, under its first name, wherever the model puts another tensor in its place."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._places: list[tuple[str, dict[str, Any], str, torch.Tensor]] = []
        self.non_persistent: list[str] = []
        seen: dict[int, str] = {}
        self.named: list[tuple[str, torch.Tensor]] = []
        for prefix, module in model.named_modules(remove_duplicate=False):
            for key, tensor in module._buffers.items():
                if tensor is None:
                    continue
                name = f"{prefix}.{key}" if prefix else key
                self.named.append((name, tensor))
                if key in module._non_persistent_buffers_set:
                    self.non_persistent.append(name)
                if id(tensor) not in seen:
                    seen[id(tensor)] = name
                    self._places.append((name, module._buffers, key, tensor))

    def settle(self) -> None:
        """A tensor that was assigned to a buffer's name is copied into the buffer, which takes its place again.

        Raises ModelError for one of another shape or dtype. A non-persistent one is left to the model then: a table
        that forward() makes larger when it needs to.
        """
        for name, owner, key, original in self._places:
            current = owner.get(key)
            if current is original:
                continue
            if not _alike(current, original):
                if name in self.non_persistent:
                    continue
                found = "None" if current is None else f"{current.dtype} {list(current.shape)}"
                raise ModelError(
                    f"the model replaced its buffer '{name}', {original.dtype} {list(original.shape)}, by {found}; a "
                    "buffer keeps shape and dtype. One that changes them on purpose should be registered with "
                    "persistent=False, or be no buffer"
                )
            with torch.no_grad():
                original.copy_(current)
            owner[key] = original

    def current(self) -> list[tuple[str, torch.Tensor]]:
        """Each buffer as it is now, but for those that the model is left alone with."""
        found = []
        for name, owner, key, original in self._places:
            tensor = owner.get(key)
            if tensor is not None and (name not in self.non_persistent or _alike(tensor, original)):
                found.append((name, tensor))
        return found


class Changes:
    """What the host has written into buffers and modes since it was last told to the runners."""

    def __init__(self, model: torch.nn.Module, structure: Structure) -> None:
        self._structure = structure
        self._buffers = Buffers(model)
        self._modes = b""  # The first step tells them.
        self.note()

    def note(self) -> None:
        """The runners have what the buffers hold now."""
        self._noted = {name: (tensor, tensor._version) for name, tensor in self._buffers.current()}

    def take(self, everything: bool = False) -> list[tuple[str, torch.Tensor]]:
        """What is to be told, as buffers by name; `everything`, whether or not it is known to have changed."""
        told: list[tuple[str, torch.Tensor]] = []
        for name, tensor in self._buffers.current():
            was, version = self._noted.get(name, (None, 0))
            if everything or tensor is not was or tensor._version != version:
                told.append((name, tensor))
        if (modes := self._structure.modes) != self._modes:
            told.append((MODES, torch.frombuffer(bytearray(modes), dtype=torch.uint8)))
        return told

    def told(self) -> None:
        """What take() gave has arrived."""
        self.note()
        self._modes = self._structure.modes
