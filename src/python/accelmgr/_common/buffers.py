# Runs in: the host and runners.
"""The buffers of a model: their values, and what else forward() and the host may do to them.

A session has the values. Where runners compute on the CPU it has one more buffer, `<forms>`: a byte for each buffer,
which says whether it is a tensor of its first or its final shape or None, and whether forward() has assigned it; and
one byte that is 1 from the first step on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NoReturn, TypeGuard

import torch

from accelmgr._common.grown_buffers import Form, Forms
from accelmgr._common.memory import dtype_name
from accelmgr.errors import ModelError

FORMS = "<forms>"
"""The name of a buffer that is none of the model's."""
FIRST, FINAL, NONE = range(3)
KIND = 3
ASSIGNED = 4
"""forward() has once put another tensor in its place: then the host does so, too, at each step."""


def alike(one: torch.Tensor | None, other: torch.Tensor | None) -> TypeGuard[torch.Tensor]:
    return one is not None and other is not None and one.shape == other.shape and one.dtype == other.dtype


def form_of(tensor: torch.Tensor) -> Form:
    return dtype_name(tensor.dtype), tuple(tensor.shape)


def _text_of(tensor: torch.Tensor | None) -> str:
    return "None" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"


@dataclasses.dataclass
class Place:
    """Of a buffer: where the model has it, and what the session reads and writes."""

    name: str
    owner: dict[str, Any]
    key: str
    first: torch.Tensor | None
    """What the model had at the start. If it grows, with its values then."""
    original: torch.Tensor
    """What the session reads and writes: `first` itself, or a tensor of the final shape if it grows."""
    grows: bool
    apart: bool = False
    """The model never has `original`: the buffer grows, or forward() has assigned one, whose memory is the model's."""
    seen: torch.Tensor | None = None
    """Of one apart: the tensor that the model had when it was last looked at."""

    @property
    def current(self) -> torch.Tensor | None:
        return self.owner.get(self.key)

    def kind(self) -> int:
        """Of the current tensor."""
        current = self.current
        if current is None:
            return NONE
        return FINAL if self.grows and alike(current, self.original) else FIRST


class Buffers:
    """The buffers of a model, each once, under its first name. A model may assign another tensor to that name."""

    def __init__(
        self, model: torch.nn.Module, grown: Forms | None = None, tell: Callable[[Forms], None] | None = None
    ) -> None:
        """grown: the final forms of buffers that the first micro-batch makes larger; None: there is no `<forms>`.

        tell: is called with such forms before an error says that there is no room for them.
        """
        self._tell = tell
        self._began = False  # Steps were committed.
        self.places: list[Place] = []
        self.non_persistent: list[str] = []
        self._empty: list[tuple[str, dict[str, Any], str]] = []
        seen: dict[Any, torch.Tensor] = {}
        self.named: list[tuple[str, torch.Tensor]] = []
        for prefix, module in model.named_modules(remove_duplicate=False):
            for key, tensor in module._buffers.items():
                if tensor is not None and tensor.is_quantized:
                    continue
                name = f"{prefix}.{key}" if prefix else key
                identity = (id(module), key) if tensor is None else id(tensor)
                if tensor is None and identity not in seen and name not in (grown or {}):
                    self._empty.append((name, module._buffers, key))
                    continue
                if key in module._non_persistent_buffers_set:
                    self.non_persistent.append(name)
                if identity not in seen:
                    seen[identity] = self._add(name, module._buffers, key, (grown or {}).get(name))
                self.named.append((name, seen[identity]))
        self.originals = [place.original for place in self.places]
        self._first_forms = [(place.original.dtype, place.original.shape) for place in self.places]
        self.forms: bytearray | None = None
        """The content of `<forms>`."""
        if grown is not None and (self.places or self._empty):
            self.forms = bytearray([*(place.kind() for place in self.places), 0])
            flags = torch.frombuffer(self.forms, dtype=torch.uint8)
            self.originals.append(flags)
            self.named.append((FORMS, flags))
            self.non_persistent.append(FORMS)

    def _add(self, name: str, owner: dict[str, Any], key: str, final: Form | None) -> torch.Tensor:
        tensor: torch.Tensor | None = owner[key]
        if final is None:
            assert tensor is not None
            self.places.append(Place(name, owner, key, tensor, tensor, False))
        else:
            first = None if tensor is None else tensor.detach().clone()
            original = torch.zeros(final[1], dtype=getattr(torch, final[0]))
            self.places.append(Place(name, owner, key, first, original, grows=True, apart=True, seen=tensor))
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

    def check_room(self) -> None:
        """Raises ModelError if the first micro-batch has made tensors of buffers that were None, without room yet."""
        if self._began or self._tell is None:
            return
        found = {name: tensor for name, owner, key in self._empty if (tensor := owner.get(key)) is not None}
        kept = {
            name: form_of(tensor)
            for name, tensor in found.items()
            if tensor.layout is torch.strided and not tensor.requires_grad
        }
        if kept:
            self._refuse(f"the model made {_text_of(found[next(iter(kept))])} of its buffer '{next(iter(kept))}'", kept)

    def settle(self) -> None:
        """Brings the values of tensors that were assigned to a buffer's name to where the session reads them.

        Raises ModelError if the tensor has another shape or dtype. A non-persistent one is left as it is then: it may
        be a table that forward() makes larger when needed.
        """
        grew: Forms = {}
        what = ""
        for number, place in enumerate(self.places):
            current = place.current
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
                with torch.no_grad():
                    place.original.copy_(current)
                place.owner[place.key] = place.original
            elif place.name not in self.non_persistent:
                before = f"{place.original.dtype} {list(place.original.shape)}"
                what = what or f"the model replaced its buffer '{place.name}', {before}, by {_text_of(current)}"
                if current is not None and current.dtype == place.original.dtype:
                    grew[place.name] = form_of(current)
        if what:
            self._refuse(what, grew)
        if self.forms is not None:
            self.forms[-1] = 1

    def _set_form(self, number: int, kind: int, assigned: bool) -> None:
        if self.forms is not None:
            self.forms[number] = (self.forms[number] & ASSIGNED) | kind | (ASSIGNED if assigned else 0)

    def _settle(self, number: int, place: Place) -> None:
        current = place.current
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
            elif place.apart:
                value = place.first if place.grows and kind == FIRST else place.original
                assert value is not None
                if current is None or form & ASSIGNED:  # Other parts of the model may have the former tensor.
                    place.owner[place.key] = value.clone()
                else:
                    self.set(current, value)
            elif current is None:
                place.owner[place.key] = place.original
            place.seen = place.current

    @staticmethod
    def set(buffer: torch.Tensor, value: torch.Tensor) -> None:
        """Gives the buffer the values, and their shape."""
        with torch.inference_mode(buffer.is_inference()), torch.no_grad():
            if buffer.shape != value.shape:
                buffer.resize_(value.shape)
            buffer.copy_(value)

    def is_stored(self, place: Place, tensor: torch.Tensor) -> bool:
        """Whether the session has its values: not of a non-persistent one, or of one that grows, of another shape."""
        return alike(tensor, place.original) or not (place.grows or place.name in self.non_persistent)

    def kinds(self) -> bytes:
        """Of each buffer. Raises ModelError for one of another shape, if it is one of those that grow."""
        for place in self.places:
            current, first = place.current, place.first
            if not place.grows or current is None or alike(current, place.original):
                continue
            if first is None or not alike(current, first) or not torch.equal(current, first):
                raise ModelError(
                    f"after the start buffer '{place.name}' of the model was changed to {_text_of(current)}: it may "
                    f"have the shape {list(place.original.shape)}, or what it had at the start"
                )
        return bytes(place.kind() for place in self.places)
