# Runs in: the host and runners.
"""The changes that the host makes to modules, parameters and buffers of its model after the start.

Parameters are in the session's memory, so a write in place is all that runners need. Everything else that a step
depends on is sent as buffers: the model's own buffers, `<forms>` (buffers.py), `<published>`, which says where
other changes are (record.py), and `<modes>`: one byte for each module (1: training mode) and for each parameter (1:
requires a gradient), which is how runners learn of `train()`, `eval()` and `requires_grad_()`.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Collection
from typing import Any

import torch

from accelmgr import _native
from accelmgr._changes.buffers import ASSIGNED, FINAL, FIRST, FORMS, KIND, NONE, OTHER, Buffers
from accelmgr._changes.grown_buffers import Forms
from accelmgr._changes.kept_attributes import Encoded
from accelmgr._changes.record import PUBLISHED, Record
from accelmgr._memory.tensors import named_tensors
from accelmgr.errors import ModelError

MODES = "<modes>"
"""The name of a buffer that the model does not have."""
OF_HOST = {MODES, PUBLISHED}
"""Buffers in which the host tells runners what it has changed."""

_address = torch.Tensor.data_ptr
_training = operator.attrgetter("training")
_version = operator.attrgetter("_version")
_requires_grad = operator.attrgetter("requires_grad")


def _listed(names: list[str]) -> str:
    return ", ".join(f"'{name}'" for name in names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _buffer_names(model: torch.nn.Module) -> set[str]:
    """Also of buffers that are None."""
    named = model.named_modules(remove_duplicate=False)
    return {f"{path}.{key}" if path else key for path, module in named for key in module._buffers}


def module_places(model: torch.nn.Module) -> int:
    """The bytes for modules in `<modes>`: room for others that may come with a refresh()."""
    return 2 * sum(1 for _ in model.modules()) + 64


class Structure:
    """The modules and parameters that `model` had when this object was made."""

    def __init__(self, model: torch.nn.Module, places: int = 0) -> None:
        """places: the session's module_places(); 0: the session is made for this model."""
        self._model = model
        self.parameters = list(model.parameters())
        self._names = dict(model.named_parameters(remove_duplicate=False))
        self._buffer_names = _buffer_names(model)
        self._switched = list(model.modules())
        self.places = places or module_places(model)
        if len(self._switched) > self.places:
            raise ModelError(
                f"the model has {len(self._switched)} modules by now, and the session has room for {self.places}: call "
                "manager.rebind()"
            )
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

    def check_buffers(self) -> None:
        """Raises ModelError if a buffer was registered or removed."""
        now = _buffer_names(self._model)
        for what, names in (("registered", now - self._buffer_names), ("removed", self._buffer_names - now)):
            if names:
                raise ModelError(
                    f"after the start {_listed(sorted(names))} of the model, a buffer, was {what}: the session has the "
                    "buffers with which the manager was started. Call manager.rebind(), which starts another one"
                )

    @property
    def modes(self) -> bytes:
        """The content of `<modes>`: one byte for each module, room for others, then one for each parameter."""
        room = bytes(self.places - len(self._switched))
        return bytes(map(_training, self._switched)) + room + bytes(map(_requires_grad, self.parameters))

    def follow(self, modes: bytes, before: bytes) -> None:
        """Applies the bytes that differ from `before`, so that modes that the model itself has switched stay."""
        if modes == before:
            return
        for module, on, was in zip(self._switched, modes, before, strict=False):
            if on != was:
                module.training = bool(on)
        for parameter, on, was in zip(self.parameters, modes[self.places :], before[self.places :], strict=True):
            if on != was:
                parameter.requires_grad_(bool(on))


def _versions(values: list[Any]) -> list[int]:
    """The versions of buffers and of values of attributes."""
    try:
        return list(map(_version, values))
    except (AttributeError, RuntimeError):  # None, and tensors of inference mode, have none.
        tensors = [isinstance(value, torch.Tensor) and not value.is_inference() for value in values]
        return [value._version if has else 0 for value, has in zip(values, tensors, strict=True)]


def _addresses(values: list[Any]) -> list[int]:
    return [value.data_ptr() if isinstance(value, torch.Tensor) else 0 for value in values]


class Changes:
    """Finds the buffers and modes that the host has changed since they were last sent to the runners.

    A buffer has changed if it is another tensor, or has another version or other memory; or if its content is not that
    of the last committed step: batch normalization writes statistics without a new version. Of more than 64 KiB a
    sample is compared.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        structure: Structure,
        record: Record,
        grown: Forms,
        handle: _native.Handle,
        written: set[str] | None = None,
    ) -> None:
        """written: buffers that the host has changed since the last step, and has sent to no runner."""
        self._structure = structure
        self._handle = handle
        numbers = {name: (number, shape) for number, (name, shape) in enumerate(handle.buffer_shapes())}
        self._record = record
        self._buffers = Buffers(model, grown if FORMS in numbers else None)
        self._places = [(place, *numbers[place.name]) for place in self._buffers.places]
        self._forms = bytearray(len(self._places) + 1)
        """The content of `<forms>` that the last committed step has left."""
        self._kept = sum(place.is_attribute for place, *_ in self._places)
        owners = enumerate(place.owner for place, *_ in self._places)
        self._encoded = [(index, owner) for index, owner in owners if isinstance(owner, Encoded)]
        self._forms_target = [0] * len(numbers)
        if FORMS in numbers:
            for name, flags in Buffers.split(torch.frombuffer(self._forms, dtype=torch.uint8), self._kept):
                self._forms_target[numbers[name][0]] = flags.data_ptr()
        self._versions: list[int] = []
        self._addresses: list[int] = []
        self._of_host: dict[str, bytes] = {}  # As sent: so the first step sends them.
        self._quantized = [
            (f"{prefix}.{key}" if prefix else key, owner, key, tensor, tensor._version)
            for prefix, module in model.named_modules()
            for owner in (module._parameters, module._buffers)
            for key, tensor in owner.items()
            if tensor is not None and tensor.is_quantized
        ]
        self.note()
        self._kinds = bytes(map(KIND.__and__, self._forms[:-1]))  # The kinds that runners have; the host's may differ.
        if written:
            named = zip((place.name for place, *_ in self._places), self._versions, strict=True)
            self._versions = [-1 if name in written else version for name, version in named]

    def _present(self) -> list[Any]:
        return [place.owner.get(place.key) for place in self._buffers.places]

    def note(self) -> None:
        """Records that the runners have the present content of the buffers."""
        self._tensors = self._present()
        self._versions = _versions(self._tensors)
        self._kinds = self._buffers.kinds()
        self._handle.copy_buffers(self._forms_target)
        self._find_dense()

    def _find_dense(self, changed: Collection[int] = ()) -> None:
        """Finds the buffers whose memory is like that in the session: those are copied and compared the fast way.

        changed: those that the host has changed, and that are still to be sent.
        """
        present = _addresses(self._tensors)
        self._addresses = [self._addresses[index] if index in changed else now for index, now in enumerate(present)]
        self._targets = [0] * len(self._forms_target)
        self._compared: dict[int, tuple[int, torch.Tensor]] = {}  # By address: number, tensor.
        self._irregular: list[int] = []
        addresses: set[int] = set()
        for index, ((place, number, shape), tensor) in enumerate(zip(self._places, self._tensors, strict=True)):
            if tensor is None or not self._buffers.is_stored(place, tensor):
                continue
            if tensor.is_contiguous() and tuple(tensor.shape) == shape:
                address = self._targets[number] = tensor.data_ptr()
                own = tensor.untyped_storage().nbytes() == tensor.nbytes
                if own and address not in addresses:
                    self._compared[address] = number, tensor
                else:
                    self._compared.pop(address, None)
                addresses.add(address)
            elif torch._debug_has_internal_overlap(tensor) == 0:  # An expanded tensor cannot be written.
                self._irregular.append(index)
        self._has_aliases = len(set(map(id, self._tensors))) < len(self._tensors)
        self._compared_addresses = list(self._compared)
        self._compared_tensors = [tensor for _, tensor in self._compared.values()]
        self._compared_targets = [0] * len(self._targets)
        for address, (number, _) in self._compared.items():
            self._compared_targets[number] = address

    def _differing(self) -> list[int]:
        """The numbers of buffers whose content is not that of the last committed step."""
        addresses = list(map(_address, self._compared_tensors))
        if addresses != self._compared_addresses:  # The memory of some is gone.
            self._find_dense()
        return self._handle.differing_buffers(self._compared_targets)

    def _changed(self) -> set[int]:
        """The indexes of buffers that were assigned, or have another version or other memory."""
        tensors = self._present()
        versions = _versions(tensors)
        now = list(zip(map(id, tensors), versions, _addresses(tensors), strict=True))
        was = list(zip(map(id, self._tensors), self._versions, self._addresses, strict=True))
        return {index for index in range(len(now)) if now[index] != was[index]} if now != was else set()

    def not_kept(self) -> list[str]:
        """Attributes whose values the last committed step could not keep."""
        if not self._kept:
            return []
        forms = zip(self._forms, self._buffers.places, strict=False)
        return sorted({place.attribute for form, place in forms if form & KIND == OTHER})

    def written(self) -> set[str]:
        """Buffers that the host has changed, and that take() will send."""
        return {self._places[index][0].name for index in self._changed()}

    def take_in(self) -> None:
        """Gives the buffers that the host has not changed the values of the last committed step."""
        changed = self._changed()
        self._take_forms(changed)
        if not changed:
            self._handle.copy_buffers(self._targets)
            self._follow_encoded(changed)
            if not self._irregular:
                return
        values = dict(named_tensors(self._handle.buffers()))
        for index in self._irregular if not changed else range(len(self._places)):
            place, tensor = self._places[index][0], self._tensors[index]
            if index in changed or tensor is None or not self._buffers.is_stored(place, tensor):
                continue
            if torch._debug_has_internal_overlap(tensor) == 0:
                Buffers.set(tensor, values[place.name])
        self._follow_encoded(changed)
        self._versions = [
            before if index in changed else now
            for index, (now, before) in enumerate(zip(_versions(self._tensors), self._versions, strict=True))
        ]
        self._find_dense(changed)

    def _follow_encoded(self, changed: set[int]) -> None:
        for index, owner in self._encoded:
            if index not in changed and self._kinds[index] == FINAL:
                owner.decode()

    def _take_forms(self, changed: set[int]) -> None:
        """Puts other tensors, or None, where forward() has done so."""
        self._handle.copy_buffers(self._forms_target)
        kinds = bytes(form & KIND for form in self._forms[:-1]) if any(self._forms[:-1]) else bytes(len(self._places))
        if not self._has_aliases and kinds == self._kinds and not any(map(ASSIGNED.__and__, self._forms)):
            return
        self._kinds = kinds
        seen: set[int] = set()
        for index, (form, (place, *_), tensor) in enumerate(
            zip(self._forms, self._places, self._tensors, strict=False)
        ):
            if index in changed:
                continue
            if isinstance(place.owner, Encoded) and kinds[index] == FINAL:
                encoded = place.owner.tensor  # decode() gives the attribute its value.
                version, address = _versions([encoded])[0], _addresses([encoded])[0]
                self._tensors[index] = encoded
                self._versions[index] = version
                self._addresses[index] = address
                continue
            if place.is_attribute and kinds[index] in (FIRST, OTHER):
                if kinds[index] == FIRST and place.kind() != FIRST:
                    first = place.first
                    place.put(first.clone() if isinstance(first, torch.Tensor) else first)
                value = place.owner.get(place.key)
                version, address = _versions([value])[0], _addresses([value])[0]
                self._tensors[index] = value
                self._versions[index] = version
                self._addresses[index] = address
                continue
            value = place.first if place.grows and kinds[index] == FIRST else place.original
            new: torch.Tensor | None = None
            if kinds[index] != NONE and value is not None:
                # Two buffers are one tensor of the host after `model.a = model.b`.
                stays = tensor is not None and not form & ASSIGNED and id(tensor) not in seen
                stays = stays and (not place.is_attribute or self._buffers.is_stored(place, tensor))
                new = tensor if stays else torch.empty(value.shape, dtype=value.dtype)
                if new is not None and place.grows and (kinds[index] == FIRST or new.shape != value.shape):
                    Buffers.set(new, value)  # Otherwise the session has the values.
                seen.add(id(new))
            version, address = _versions([new])[0], _addresses([new])[0]
            # No call between these: a signal handler that raises in one would leave a tensor that the host has made.
            place.owner[place.key] = self._tensors[index] = new
            self._versions[index] = version
            self._addresses[index] = address
        self._find_dense()

    def sync(self) -> None:
        """Gives all buffers the values of the last committed step."""
        self.note()
        self.take_in()

    def _present_of_host(self) -> dict[str, bytes]:
        return {PUBLISHED: self._record.place, MODES: self._structure.modes}

    def take(self, everything: bool = False) -> list[tuple[str, torch.Tensor]]:
        """The buffers to send, by name. everything: all of them, also if no change is known."""
        for name, owner, key, quantized, version in self._quantized:
            if owner.get(key) is not quantized or quantized._version != version:
                raise ModelError(
                    f"after the start '{name}' of the model was changed, and runners cannot be told: it is quantized. "
                    "Call manager.rebind(), which starts runners for the changed model"
                )
        told: list[tuple[str, torch.Tensor]] = []
        changed = self._changed()
        differing = self._differing()
        if everything or changed or differing:
            kinds = self._buffers.kinds()
            for index, (place, number, _) in enumerate(self._places):
                tensor = place.current
                if tensor is None or not self._buffers.is_stored(place, tensor):
                    continue
                if everything or index in changed or number in differing:
                    told.append((place.name, tensor))
            if kinds != self._kinds:
                told += Buffers.split(self._forms_with(kinds), self._kept)
        if (present := self._present_of_host()) != self._of_host:
            told += [
                (name, torch.frombuffer(bytearray(content), dtype=torch.uint8)) for name, content in present.items()
            ]
        return told

    def _forms_with(self, kinds: bytes) -> torch.Tensor:
        if self._buffers.forms is None:
            name = next(place.name for (place, *_), kind in zip(self._places, kinds, strict=True) if kind == NONE)
            raise ModelError(
                f"after the start buffer '{name}' of the model became None: only runners on the CPU can be told. Use a "
                "tensor of zeros"
            )
        forms = [form & ASSIGNED | kind for form, kind in zip(self._forms, kinds, strict=False)]
        return torch.tensor([*forms, self._forms[-1]], dtype=torch.uint8)

    def told(self, changes: list[tuple[str, torch.Tensor]]) -> None:
        """Records that the result of take() has been sent."""
        if any(name not in OF_HOST for name, _ in changes):
            self.note()
        self._of_host = self._present_of_host()
