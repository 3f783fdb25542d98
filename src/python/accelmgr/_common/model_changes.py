# Runs in: the host and runners.
"""The modules, parameters and buffers of a model, and the changes that the host makes to them after the start.

Parameters are in the session's memory, so a write in place is all that runners need. Everything else that a step
depends on is sent as buffers: the model's own buffers, and `<modes>`: how far the journal of other changes is to be
read (eight bytes, journal.py), then one byte for each module (1: training mode) and for each parameter (1: requires a
gradient).
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Callable
from typing import Any, NoReturn, TypeGuard

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from accelmgr import _native
from accelmgr._common import torch_settings as _settings
from accelmgr._common.grown_shapes import Shapes
from accelmgr._common.journal import SETTINGS, Journal
from accelmgr._common.memory import named_tensors
from accelmgr._common.model_outline import Outline
from accelmgr.errors import ModelError

MODES = "<modes>"
"""The name of a buffer that is none of the model's."""
JOURNAL_BYTES = 8

_address = torch.Tensor.data_ptr
_training = operator.attrgetter("training")
_version = operator.attrgetter("_version")
_requires_grad = operator.attrgetter("requires_grad")


def _listed(names: list[str]) -> str:
    return ", ".join(f"'{name}'" for name in names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _alike(one: torch.Tensor | None, other: torch.Tensor) -> TypeGuard[torch.Tensor]:
    return one is not None and one.shape == other.shape and one.dtype == other.dtype


def leaves_of(parameter: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """The tensors that have the memory of a parameter: itself, or those inside a quantized one (torchao), by suffix."""
    if not is_traceable_wrapper_subclass(parameter):
        return [("", parameter)]
    names, _ = parameter.__tensor_flatten__()
    inner = [(name, getattr(parameter, name)) for name in names]
    return [(f".{name}{suffix}", leaf) for name, tensor in inner for suffix, leaf in leaves_of(tensor)]


def named_leaves(model: torch.nn.Module, remove_duplicate: bool = True) -> list[tuple[str, torch.Tensor]]:
    """What the session holds of a model's parameters."""
    named = model.named_parameters(remove_duplicate=remove_duplicate)
    return [(name + suffix, leaf) for name, parameter in named for suffix, leaf in leaves_of(parameter)]


def tensors_of(model: torch.nn.Module) -> list[torch.Tensor]:
    """Parameters, then buffers, each once: the order in which host and runners number them."""
    return [*model.parameters(), *model.buffers()]


class Structure:
    """The modules and parameters that `model` had when this object was made."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self.parameters = list(model.parameters())
        self._names = dict(model.named_parameters(remove_duplicate=False))
        self._switched = list(model.modules())
        self._places = 2 * len(self._switched) + 64  # For those that will come.
        self.changes = 0  # How often modules without parameters came or went, as check() saw it.
        self._look()

    def _look(self) -> None:
        # A module never replaces these dictionaries. Comparing their values is cheap enough for every step.
        self._dictionaries: list[dict[str, Any]] = [
            entries
            for module in self._model.modules()
            for entries in (module._modules, module._parameters)
            if isinstance(entries, dict)
        ]
        self._found = list(itertools.chain.from_iterable(map(dict.values, self._dictionaries)))

    def check(self) -> None:
        """Raises ModelError if a parameter was added, removed, or replaced by another object."""
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
                    "(load_state_dict() without assign=True, or copy_() under torch.no_grad()), or call "
                    "manager.rebind(), which starts runners for the changed model"
                )
        self._look()  # Modules without parameters came or went.
        self.changes += 1

    def replace_modules(self) -> None:
        """Gives modules that came a place in `modes`. Raises ModelError for too many."""
        known = set(map(id, self._switched))
        self._switched += [module for module in self._model.modules() if id(module) not in known]
        if len(self._switched) > self._places:
            raise ModelError(
                f"modules of the model were replaced too often since the start: runners follow train() and eval() of "
                f"{self._places} of them. Call manager.rebind(), which starts others"
            )
        self._look()

    @property
    def modes(self) -> bytes:
        """The content of `<modes>`: one byte for each module, room for others, then one for each parameter."""
        room = bytes(self._places - len(self._switched))
        return bytes(map(_training, self._switched)) + room + bytes(map(_requires_grad, self.parameters))

    def follow(self, modes: bytes, before: bytes) -> None:
        """Applies the bytes that differ from `before`, so that modes that the model itself has switched stay."""
        if modes == before:
            return
        for module, on, was in zip(self._switched, modes, before, strict=False):
            if on != was:
                module.training = bool(on)
        for parameter, on, was in zip(self.parameters, modes[self._places :], before[self._places :], strict=True):
            if on != was:
                parameter.requires_grad_(bool(on))


GROWN = "<grown>"
"""The name of a buffer that is none of the model's: for each that grows, whether it has its final shape."""


@dataclasses.dataclass
class _Growing:
    """A buffer whose shape the first micro-batch decides, as that of an observer of quantization."""

    index: int
    first: torch.Tensor
    """Its values before it has grown."""
    final: torch.Tensor
    """What the session reads and writes in its place."""


class Buffers:
    """The buffers of a model, each once, under its first name. A model may assign another tensor to that name."""

    def __init__(
        self, model: torch.nn.Module, grown: Shapes | None = None, tell: Callable[[Shapes], None] | None = None
    ) -> None:
        """grown: the final shapes of buffers that the first micro-batch makes larger.

        tell: is called with such shapes before an error says that there is no room for them.
        """
        grown = grown or {}
        self._tell = tell
        self._places: list[tuple[str, dict[str, Any], str, torch.Tensor]] = []
        self.non_persistent: list[str] = []
        self._growing: list[_Growing] = []
        seen: dict[int, str] = {}
        stand_ins: dict[int, torch.Tensor] = {}
        self.named: list[tuple[str, torch.Tensor]] = []
        for prefix, module in model.named_modules(remove_duplicate=False):
            for key, tensor in module._buffers.items():
                if tensor is None:
                    continue
                name = f"{prefix}.{key}" if prefix else key
                if key in module._non_persistent_buffers_set:
                    self.non_persistent.append(name)
                if id(tensor) not in seen:
                    seen[id(tensor)] = name
                    if name in grown:
                        final = stand_ins[id(tensor)] = torch.zeros(grown[name], dtype=tensor.dtype)
                        self._growing.append(_Growing(len(self._places), tensor.detach().clone(), final))
                    self._places.append((name, module._buffers, key, tensor))
                self.named.append((name, stand_ins.get(id(tensor), tensor)))
        self.originals = [stand_ins.get(id(tensor), tensor) for *_, tensor in self._places]
        self._forms = [(tensor.dtype, tensor.shape) for *_, tensor in self._places]
        self._growing_places = {growing.index for growing in self._growing}
        self._flags = torch.zeros(len(self._growing), dtype=torch.uint8)
        if self._growing:
            self.originals.append(self._flags)
            self.named.append((GROWN, self._flags))
            self.non_persistent.append(GROWN)

    def check_alike(self) -> None:
        """Raises ModelError for a buffer whose shape or dtype was changed in place."""
        changed = [
            (name, form, tensor)
            for index, ((name, *_, tensor), form) in enumerate(zip(self._places, self._forms, strict=True))
            if index not in self._growing_places and (tensor.dtype, tensor.shape) != form
        ]
        if changed:
            name, (dtype, shape), tensor = changed[0]
            self._refuse(
                f"the model changed its buffer '{name}', {dtype} {list(shape)}, to {tensor.dtype} {list(tensor.shape)}",
                {name: tensor.shape for name, (dtype, _), tensor in changed if tensor.dtype == dtype},
            )

    def _refuse(self, what: str, shapes: dict[str, torch.Size]) -> NoReturn:
        if shapes and self._tell is not None:
            self._tell({name: tuple(shape) for name, shape in shapes.items()})
        raise ModelError(
            f"{what}; a buffer must keep its shape and dtype. Where the first batch decides about the shape, run one "
            "in the host before the manager starts. Register a buffer that changes on purpose with persistent=False, "
            "or make it a plain attribute"
        )

    def settle(self) -> None:
        """Copies a tensor that was assigned to a buffer's name into the buffer, and puts the buffer back.

        Raises ModelError if the tensor has another shape or dtype. A non-persistent one is left as it is then: it may
        be a table that forward() makes larger when needed.
        """
        grew: dict[str, torch.Size] = {}
        what = ""
        for index, (name, owner, key, original) in enumerate(self._places):
            current = owner.get(key)
            if current is original or index in self._growing_places:
                continue
            if not _alike(current, original):
                if name in self.non_persistent:
                    continue
                found = "None" if current is None else f"{current.dtype} {list(current.shape)}"
                what = (
                    what
                    or f"the model replaced its buffer '{name}', {original.dtype} {list(original.shape)}, by {found}"
                )
                if current is not None and current.dtype == original.dtype:
                    grew[name] = current.shape
                continue
            with torch.no_grad():
                original.copy_(current)
            owner[key] = original
        if what:
            self._refuse(what, grew)
        for number, growing in enumerate(self._growing):
            self._settle(number, growing)

    def _settle(self, number: int, growing: _Growing) -> None:
        name, owner, key, _ = self._places[growing.index]
        current = owner.get(key)
        if current is not None and _alike(current, growing.final):
            growing.final.copy_(current.detach())
            self._flags[number] = 1
        elif current is not None and _alike(current, growing.first):
            self._flags[number] = 0
        else:
            shape = torch.Size() if current is None else current.shape
            self._refuse(f"the model changed its buffer '{name}' again, to {list(shape)}", {name: shape})

    def loaded(self) -> None:
        """The session's values were written to `originals`."""
        for growing, has_grown in zip(self._growing, self._flags.tolist(), strict=True):
            _, owner, key, _ = self._places[growing.index]
            self.set(owner[key], growing.final if has_grown else growing.first)

    @staticmethod
    def set(buffer: torch.Tensor, value: torch.Tensor) -> None:
        """Gives the buffer the values, and their shape."""
        with torch.no_grad():
            if buffer.shape != value.shape:
                buffer.resize_(value.shape)
            buffer.copy_(value)

    def current(self) -> list[tuple[str, torch.Tensor]]:
        """The current tensor of each buffer, but for non-persistent ones of another shape or dtype."""
        found = []
        for name, owner, key, original in self._places:
            tensor = owner.get(key)
            if tensor is not None and (name not in self.non_persistent or _alike(tensor, original)):
                found.append((name, tensor))
        return found

    def sent(self, changed: list[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
        """What the host sends of what it has changed: a growing buffer only in its final shape."""
        if not self._growing:
            return changed
        finals = {self._places[growing.index][0]: growing.final for growing in self._growing}
        fit = [(name, tensor) for name, tensor in changed if name not in finals or _alike(tensor, finals[name])]
        if any(name in finals for name, _ in fit):
            there = [_alike(self._places[g.index][1].get(self._places[g.index][2]), g.final) for g in self._growing]
            fit.append((GROWN, torch.tensor(there, dtype=torch.uint8)))
        return fit


class Changes:
    """Finds the buffers and modes that the host has changed since they were last sent to the runners."""

    def __init__(
        self, model: torch.nn.Module, structure: Structure, journal: Journal, grown: Shapes, handle: _native.Handle
    ) -> None:
        self._structure = structure
        self._handle = handle
        self._places = {name: (number, shape) for number, (name, shape) in enumerate(handle.buffer_shapes())}
        self._journal = journal
        self._settings = journal.settings
        self._buffers = Buffers(model, grown)
        self._outline = Outline(model, tensors_of(model))
        self._seen = structure.changes
        self._modes = b""  # So that the first step sends them.
        self.note()

    def note(self) -> None:
        """Records that the runners have the present content of the buffers."""
        self._noted = {name: (tensor, tensor._version) for name, tensor in self._buffers.current()}
        self._find_dense()

    def _find_dense(self) -> None:
        """Finds the buffers whose memory is like that in the session: those are copied the fast way."""
        self._dense: list[torch.Tensor] = []
        self._targets = [0] * len(self._places)
        self._irregular: list[str] = []
        for name, (tensor, _) in self._noted.items():
            number, shape = self._places[name]
            if tensor.is_contiguous() and tuple(tensor.shape) == shape:
                self._dense.append(tensor)
                self._targets[number] = tensor.data_ptr()
            elif torch._debug_has_internal_overlap(tensor) == 0:  # An expanded tensor cannot be written.
                self._irregular.append(name)
        self._dense_state = self._present_state()

    def _present_state(self) -> tuple[list[int], list[int]]:
        return list(map(_version, self._dense)), list(map(_address, self._dense))

    def take_in(self) -> None:
        """Gives the buffers that the host has not changed the values of the last committed step."""
        same = self._present_state() == self._dense_state
        if same:
            self._handle.copy_buffers(self._targets)
        if same and not self._irregular:
            return
        values = dict(named_tensors(self._handle.buffers()))
        for name in self._irregular if same else list(self._noted):
            tensor, version = self._noted[name]
            if tensor._version == version and not torch._debug_has_internal_overlap(tensor):
                Buffers.set(tensor, values[name])
                self._noted[name] = (tensor, tensor._version)
        self._find_dense()

    def write_journal(self) -> None:
        """Writes what has changed beside tensors and modes. Raises ModelError for what runners cannot be told."""
        settings = _settings.current()
        if settings != self._settings:
            changed = _settings.sendable(_settings.changed(self._settings, settings))
            self._journal.write((SETTINGS, changed), {})
            self._settings = settings
        changed_modules = self._structure.changes != self._seen
        if changed_modules:
            self._structure.replace_modules()
        self._outline.send(self._journal, changed_modules)
        self._seen = self._structure.changes

    def _present_modes(self) -> bytes:
        return self._journal.end.to_bytes(JOURNAL_BYTES, "little") + self._structure.modes

    def take(self, everything: bool = False) -> list[tuple[str, torch.Tensor]]:
        """The buffers to send, by name. everything: all of them, also if no change is known."""
        told: list[tuple[str, torch.Tensor]] = []
        for name, tensor in self._buffers.current():
            was, version = self._noted.get(name, (None, 0))
            if everything or tensor is not was or tensor._version != version:
                told.append((name, tensor))
        told = self._buffers.sent(told)
        if (modes := self._present_modes()) != self._modes:
            told.append((MODES, torch.frombuffer(bytearray(modes), dtype=torch.uint8)))
        return told

    def told(self) -> None:
        """Records that the result of take() has been sent."""
        self.note()
        self._modes = self._present_modes()
