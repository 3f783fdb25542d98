# Runs in: the host and runners.
"""The buffers of a model: their values, and what else forward() and the host may do to them.

The session has the values; model_changes.py says which of them the host sends and takes in. Where runners compute on
the CPU it has one more buffer, `<forms>`. A byte for each buffer says whether the buffer is None or a tensor of its
first or final shape, and whether forward() has assigned it. The last byte is 1 from the first step on.

Attributes that the session keeps as well (kept_attributes.py) have places as buffers do. Their bytes are in `<kept>`,
so that a run that does not know these attributes yet can resume from a checkpoint.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any, NoReturn, TypeGuard

import torch

from accelmgr._changes.grown_buffers import Form, Forms, form_of
from accelmgr._changes.kept_attributes import LARGEST_BYTES, MISSING, Before, Encoded, is_tensor, kept_attributes, same
from accelmgr._memory.tensors import write
from accelmgr._model.constants import CHANGES, Constants
from accelmgr.errors import ModelError

FORMS = "<forms>"
KEPT = "<kept>"
"""Names of buffers that the model does not have."""
FIRST, FINAL, NONE, OTHER = range(4)
"""OTHER, of attributes: something that the session does not have."""
KIND = 3
ASSIGNED = 4
"""forward() has once put another tensor in the buffer's place; from then on the host does so, too, at each step."""


def alike(one: Any, other: Any) -> TypeGuard[torch.Tensor]:
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return False
    return one.shape == other.shape and one.dtype == other.dtype


def _text_of(tensor: torch.Tensor | None) -> str:
    return "None" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"


@dataclasses.dataclass
class Place:
    """Where the model has a buffer, and the tensor that the session reads and writes for it."""

    name: str
    owner: dict[str, Any]
    key: str
    first: Any
    """What the model had at the start. A buffer that grows keeps its values of then; an attribute may be anything, or
    MISSING."""
    original: torch.Tensor
    """What the session reads and writes: `first` itself, or a tensor of the final shape if it grows."""
    grows: bool
    apart: bool = False
    """The model never has `original`: the buffer grows, or forward() has assigned one, whose memory is the model's."""
    seen: torch.Tensor | None = None
    """If `apart`: the tensor that the model had when this place was last looked at."""
    is_attribute: bool = False

    @property
    def attribute(self) -> str:
        """The attribute's name, also where this place is a number, a generator or one entry of a tuple."""
        return self.name.partition("(")[0]

    @property
    def current(self) -> torch.Tensor | None:
        value = self.owner.get(self.key)
        return None if self.is_attribute and not is_tensor(value) else value

    def kind(self) -> int:
        """The kind of the current value."""
        value = self.owner.get(self.key, MISSING)
        if value is None:
            return NONE
        if not self.is_attribute:
            return FINAL if self.grows and alike(value, self.original) else FIRST
        if is_tensor(value) and alike(value, self.original):
            return FINAL
        return FIRST if same(value, self.first) else OTHER

    def put(self, value: Any) -> None:
        if value is MISSING:
            self.owner.pop(self.key, None)
        else:
            self.owner[self.key] = value


class Buffers:
    """The buffers of a model, each once, under its first name. A model may assign another tensor to that name."""

    def __init__(
        self, model: torch.nn.Module, grown: Forms | None = None, tell: Callable[[Forms], None] | None = None
    ) -> None:
        """grown: the final forms of buffers that the first micro-batch makes larger; None: there is no `<forms>`.

        tell: is called with such forms before an error says that there is no room for them.
        """
        self._model = model
        self._tell = tell
        constants = dict(Constants(model).named)
        if grown is not None:
            grown = {name: form for name, form in grown.items() if form != CHANGES}
        self._began = False  # Steps were committed.
        self._before: Before | None = None
        self.places: list[Place] = []
        self.non_persistent: list[str] = []
        self._empty: list[tuple[str, dict[str, Any], str]] = []
        seen: dict[Any, torch.Tensor] = {}
        self.named: list[tuple[str, torch.Tensor]] = []
        for name, owner, key in kept_attributes(model, grown or {}):
            self.non_persistent.append(name)
            self.named.append((name, self._add(name, owner, key, (grown or {})[name], is_attribute=True)))
        kept = len(self.places)
        for prefix, module in model.named_modules(remove_duplicate=False):
            for key, tensor in module._buffers.items():
                name = f"{prefix}.{key}" if prefix else key
                if name in constants or (tensor is not None and tensor.is_quantized):
                    continue
                identity = (id(module), key) if tensor is None else id(tensor)
                if tensor is None and identity not in seen and name not in (grown or {}):
                    self._empty.append((name, module._buffers, key))
                    continue
                if key in module._non_persistent_buffers_set:
                    self.non_persistent.append(name)
                if identity not in seen:
                    seen[identity] = self._add(name, module._buffers, key, (grown or {}).get(name))
                self.named.append((name, seen[identity]))
        self._encoded = [number for number, place in enumerate(self.places) if isinstance(place.owner, Encoded)]
        self.originals = [place.original for place in self.places]
        self._first_forms = [(place.original.dtype, place.original.shape) for place in self.places]
        self.forms: bytearray | None = None
        """The content of `<forms>`."""
        if grown is not None:
            self.forms = bytearray([*(place.kind() for place in self.places), 0])
            for name, flags in self.split(torch.frombuffer(self.forms, dtype=torch.uint8), kept):
                self.originals.append(flags)
                self.named.append((name, flags))
                self.non_persistent.append(name)

    @staticmethod
    def split(forms: torch.Tensor, kept: int) -> list[tuple[str, torch.Tensor]]:
        """The content of `<forms>`, and of `<kept>` if there is one."""
        return [(FORMS, forms[kept:])] + ([(KEPT, forms[:kept])] if kept else [])

    def _add(
        self, name: str, owner: dict[str, Any], key: str, final: Form | None, is_attribute: bool = False
    ) -> torch.Tensor:
        tensor = owner.get(key, MISSING)
        if final is None:
            assert isinstance(tensor, torch.Tensor)
            self.places.append(Place(name, owner, key, tensor, tensor, False))
        else:
            first = tensor.detach().clone() if isinstance(tensor, torch.Tensor) else tensor
            original = torch.zeros(final[1], dtype=getattr(torch, final[0]))
            place = Place(name, owner, key, first, original, grows=True, apart=True, is_attribute=is_attribute)
            if (current := place.current) is not None and place.kind() == FINAL:
                original.copy_(current.detach())
            place.seen = current
            self.places.append(place)
        return self.places[-1].original

    def check_alike(self) -> None:
        """Raises ModelError for a buffer whose shape or dtype was changed in place."""
        changed = [
            (place.name, form, place.original)
            for place, form in zip(self.places, self._first_forms, strict=True)
            if not place.grows and (place.original.dtype, place.original.shape) != form
        ]
        if changed:
            name, (dtype, shape), tensor = changed[0]
            self._refuse(
                f"the model changed its buffer '{name}', {dtype} {list(shape)}, to {_text_of(tensor)}",
                {name: form_of(tensor) for name, (dtype, _), tensor in changed if tensor.dtype == dtype},
            )

    def _refuse(self, what: str, forms: Forms) -> NoReturn:
        if forms and self._tell is not None:
            self._tell(forms)
        raise ModelError(
            f"{what}; a buffer must keep its shape and dtype. Where the first batch decides about the shape, run one "
            "in the host before the manager starts. Register a buffer that changes on purpose with persistent=False, "
            "or make it a plain attribute"
        )

    def begin_attempt(self) -> None:
        self._began = self.forms is not None and self.forms[-1] == 1
        self._before = None

    def begin_forward(self) -> None:
        """Notes the attributes of modules as they are before the first micro-batch of the first step."""
        if not self._began and self._before is None and self._tell is not None and self.forms is not None:
            self._before = Before(self._model)

    def check_room(self) -> list[str]:
        """Raises ModelError if the first micro-batch made tensors that have no room in the session yet: of buffers that
        were None, or of attributes. Returns warnings of tensors that stay in the runner."""
        if self._began or self._tell is None:
            return []
        before, self._before = self._before, None
        places = {place.name for place in self.places}
        left = before.left(places) if before is not None else {}
        large = {name: tensor for name, tensor in left.items() if tensor.nbytes > LARGEST_BYTES}
        if kept := {name: form_of(tensor) for name, tensor in left.items() if name not in large}:
            name = next(iter(kept))
            self._refuse(f"the model made {_text_of(left[name])} of its attribute '{name}'", kept)
        found = {name: tensor for name, owner, key in self._empty if (tensor := owner.get(key)) is not None}
        kept = {
            name: form_of(tensor)
            for name, tensor in found.items()
            if tensor.layout is torch.strided and not tensor.requires_grad
        }
        if kept:
            self._refuse(f"the model made {_text_of(found[next(iter(kept))])} of its buffer '{next(iter(kept))}'", kept)
        warnings = []
        if before is not None and (names := before.left_in_python(places)):
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            warnings.append(
                f"forward() has changed '{names[0]}'{more} of the model, which stays in the runner and is lost with "
                "it: only tensors in attributes of modules come back, and numbers of a module that keeps nothing else. "
                "Return what the loop reads as an output, or read and reset it with manager.call()"
            )
        return warnings + [
            f"attribute '{name}' of the model, {_text_of(tensor)}, is too large to be kept: the host does not get what "
            "forward() assigns, and a runner that takes the place of another begins without it. If the model reads it "
            "in the next step, register it as a buffer"
            for name, tensor in large.items()
        ]

    def settle(self) -> None:
        """Brings the values of tensors that were assigned to a buffer's name to where the session reads them.

        Raises ModelError if the tensor has another shape or dtype. A non-persistent buffer is then left as it is: it
        may be a table that forward() makes larger when needed.
        """
        grew: Forms = {}
        what = ""
        for number, place in enumerate(self.places):
            current = place.current
            if isinstance(place.owner, Encoded):
                continue
            if place.apart:
                self._settle(number, place)
            elif current is place.original:
                self._set_form(number, FIRST, False)
            elif current is None and self.forms is not None:
                self._set_form(number, NONE, True)
            elif alike(current, place.original) and self.forms is not None:
                place.original = self.originals[number] = current.detach().clone(memory_format=torch.contiguous_format)
                place.apart, place.seen = True, current
                self._set_form(number, FIRST, True)
            elif alike(current, place.original):
                write(place.original, current)
                place.owner[place.key] = place.original
            elif place.name not in self.non_persistent:
                before = f"{place.original.dtype} {list(place.original.shape)}"
                what = what or f"the model replaced its buffer '{place.name}', {before}, by {_text_of(current)}"
                if current is not None and current.dtype == place.original.dtype:
                    grew[place.name] = form_of(current)
        if what:
            self._refuse(what, grew)
        if self._encoded:
            self._settle_encoded()
        if self.forms is not None:
            self.forms[-1] = 1

    def _settle_encoded(self) -> None:
        """Numbers are kept as long as all tensors of their module are: a number may tell what a tensor has."""
        lost = {
            place.name.rpartition(".")[0]
            for form, place in zip(self.forms or b"", self.places, strict=False)
            if place.is_attribute and not isinstance(place.owner, Encoded) and form & KIND == OTHER
        }
        for number in self._encoded:
            if self.places[number].name.rpartition(".")[0] in lost:
                self._set_form(number, OTHER, False)
            else:
                self._settle(number, self.places[number])

    def _set_form(self, number: int, kind: int, assigned: bool) -> None:
        if self.forms is not None:
            self.forms[number] = (self.forms[number] & ASSIGNED) | kind | (ASSIGNED if assigned else 0)

    def _settle(self, number: int, place: Place) -> None:
        current = place.current
        if place.is_attribute:
            if (kind := place.kind()) == FINAL and current is not None:
                place.original.copy_(current)
            self._set_form(number, kind, current is not place.seen)
            place.seen = current
            return
        if alike(current, place.original):
            place.original.copy_(current.detach())
        elif current is not None and not (place.grows and alike(current, place.first)):
            if not place.grows and place.name in self.non_persistent:
                return
            self._refuse(
                f"the model changed its buffer '{place.name}' again, to {_text_of(current)}",
                {place.name: form_of(current)} if current.dtype == place.original.dtype else {},
            )
        self._set_form(number, place.kind(), current is not place.seen)
        place.seen = current

    def loaded(self) -> None:
        """The session's values were written to `originals`."""
        if self.forms is None:
            return
        self._began = self.forms[-1] == 1
        for form, place in zip(self.forms, self.places, strict=False):
            kind = form & KIND
            current = place.current
            if kind == NONE:
                place.owner[place.key] = None
            elif place.apart and kind != OTHER:
                value = place.first if place.grows and kind == FIRST else place.original
                if not isinstance(value, torch.Tensor):
                    place.put(value)
                elif (
                    current is None
                    or form & ASSIGNED  # Other parts of the model may have the former tensor.
                    or (place.is_attribute and not alike(current, value))
                    or isinstance(place.owner, Encoded)
                ):
                    place.owner[place.key] = value.clone()
                else:
                    self.set(current, value)
            elif current is None:
                place.owner[place.key] = place.original
            place.seen = place.current

    @staticmethod
    def set(buffer: torch.Tensor, value: torch.Tensor) -> None:
        """Gives the buffer the values, and their shape."""
        with torch.inference_mode() if buffer.is_inference() else contextlib.nullcontext():
            if buffer.shape != value.shape:
                buffer.resize_(value.shape)
            write(buffer, value)

    def is_stored(self, place: Place, tensor: torch.Tensor) -> bool:
        """Whether the session has the values of `tensor`. It has none of a non-persistent or growing buffer that has
        another shape."""
        if place.is_attribute:
            return is_tensor(tensor) and alike(tensor, place.original)
        return alike(tensor, place.original) or not (place.grows or place.name in self.non_persistent)

    def held(self) -> list[str]:
        """The names of attributes whose values the session has."""
        forms = zip(self.forms or b"", self.places, strict=False)
        return [place.attribute for form, place in forms if place.is_attribute and form & KIND in (FINAL, NONE)]

    def kinds(self) -> bytes:
        """The kind of each buffer. Raises ModelError if a buffer that grows has neither its first value nor its final
        form."""
        for place in self.places:
            current, first = place.current, place.first
            if not place.grows or place.is_attribute or current is None or alike(current, place.original):
                continue
            if first is None or not alike(current, first) or not torch.equal(current, first):
                raise ModelError(
                    f"after the start buffer '{place.name}' of the model was changed to {_text_of(current)}: it may "
                    f"have the shape {list(place.original.shape)}, or what it had at the start"
                )
        return bytes(place.kind() for place in self.places)
