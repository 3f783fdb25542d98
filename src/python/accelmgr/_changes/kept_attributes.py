# Runs in: the host and runners.
"""Attributes of modules that are kept as buffers are: the state of a recurrent network, a running mean.

They are those to which forward() assigns or writes a tensor in the first step, a tuple of tensors, or another number,
and generators from which it draws. Each tensor of a tuple has a place of its own (`state(0)`); a number has one as a
tensor without dimensions (`count(number)`), and a generator has one for its state (`noise(generator)`). Whether
forward() reads them again is not asked: that cannot be seen, and the host may want to look at what forward() does not.
So a memory of the last batch is kept as well, whose shape may change from batch to batch. That is no error: the
attribute is as if it were not kept until it has its shape again.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, TypeGuard

import torch

from accelmgr._changes.grown_buffers import DTYPES, Form, Forms, form_of
from accelmgr._memory.tensors import dtype_name, is_private
from accelmgr._serialization.origin import is_of_project, is_of_script

MISSING = object()
"""The value of an attribute that a module does not have."""
_KEPT_DTYPES = frozenset(getattr(torch, name, None) for name in DTYPES.values())
LARGEST_BYTES = 1 << 24
"""The largest tensor that is kept: copying a larger one in each step takes long, and the session has several copies."""
_DTYPE_OF = {bool: torch.bool, int: torch.int64, float: torch.float64}
_NUMBER, _GENERATOR = "(number)", "(generator)"
"""The names of places of numbers and of generators end with these."""


def is_tensor(value: Any) -> TypeGuard[torch.Tensor]:
    """Whether an attribute can be kept while this is its value."""
    return (
        type(value) is torch.Tensor
        and value.device.type == "cpu"
        and value.layout is torch.strided
        and value.dtype in _KEPT_DTYPES
        and not (value.requires_grad or value.is_inference())
    )


def _dtype_of(value: Any) -> torch.dtype | None:
    """The dtype of a tensor that has this number; None if it is none, or an integer of more than 64 bits."""
    return None if type(value) is int and not -(1 << 63) <= value < 1 << 63 else _DTYPE_OF.get(type(value))


def _is_generator(value: Any) -> TypeGuard[torch.Generator]:
    return isinstance(value, torch.Generator) and value.device.type == "cpu"


def is_kept(value: Any, form: Form) -> bool:
    """Whether the session says that this is the value of an attribute, kept in that form."""
    return value is None or (is_tensor(value) and form_of(value) == form)


def are_kept(value: Any, name: str, forms: Forms) -> bool:
    """is_kept() for an attribute of that name, which may be no tensor, or for the tensors of a tuple."""
    if name in forms:
        return is_kept(value, forms[name])
    if name + _NUMBER in forms:
        return value is None or (
            (dtype := _dtype_of(value)) is not None and (dtype_name(dtype), ()) == forms[name + _NUMBER]
        )
    if name + _GENERATOR in forms:
        return value is None or _is_generator(value)
    if f"{name}(0)" not in forms:
        return False
    if type(value) is not tuple:
        return value is None
    names = [f"{name}({index})" for index in range(len(value))]
    whole = f"{name}({len(value)})" not in forms
    return whole and all(
        one is not None and each in forms and is_kept(one, forms[each]) for one, each in zip(value, names, strict=True)
    )


class _Attribute(dict[str, Any]):
    """Stands for the attributes of a module, of which it has one."""

    def __init__(self, attributes: dict[str, Any], name: str) -> None:
        super().__init__()
        self._attributes = attributes
        self._name = name

    def pop(self, key: str, default: Any = None) -> Any:
        return self._attributes.pop(self._name, default)


class Entries(_Attribute):
    """The tensors of a tuple that is an attribute of a module, as if each were an attribute: "0", "1".

    If the attribute is anything else, each entry is the attribute itself.
    """

    def __init__(self, attributes: dict[str, Any], name: str, count: int) -> None:
        super().__init__(attributes, name)
        self._count = count

    def get(self, key: str, default: Any = None) -> Any:
        value = self._attributes.get(self._name, default)
        whole = type(value) is tuple and len(value) == self._count
        return value[int(key)] if whole and all(isinstance(each, torch.Tensor) for each in value) else value

    def __setitem__(self, key: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            found: Any = self._attributes.get(self._name)
            entries: list[Any] = [None] * self._count
            if type(found) is tuple and len(found) == self._count:
                entries = list(found)
            if entries[int(key)] is value:
                return
            entries[int(key)] = value
            value = tuple(entries)
        self._attributes[self._name] = value


class Encoded(_Attribute):
    """An attribute of a module that is a number or a generator, as if it were a tensor of this form.

    If the attribute is anything else, the entry is the attribute itself.
    """

    def __init__(self, attributes: dict[str, Any], name: str, form: Form) -> None:
        super().__init__(attributes, name)
        self.tensor = torch.zeros(form[1], dtype=getattr(torch, form[0]))

    def get(self, key: str, default: Any = None) -> Any:
        value = self._attributes.get(self._name, default)
        return self.tensor if self._encode(value) else value

    def __setitem__(self, key: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            self.tensor.copy_(value)
            self.decode()
        else:
            self._attributes[self._name] = value

    def decode(self) -> None:
        """Gives the attribute the value of its tensor, which was written."""
        self._attributes[self._name] = self._decoded()

    def _encode(self, value: Any) -> bool:
        """Writes a value into the tensor that does not have it. False: it has another form."""
        raise NotImplementedError

    def _decoded(self) -> Any:
        raise NotImplementedError


class _Number(Encoded):
    _value: Any = MISSING
    """What the tensor has."""

    def _encode(self, value: Any) -> bool:
        if value is not self._value:
            if _dtype_of(value) != self.tensor.dtype:
                return False
            self._value = value
            self.tensor.fill_(value)
        return True

    def _decoded(self) -> Any:
        self._value = self.tensor.item()
        return self._value


class _Generator(Encoded):
    def _encode(self, value: Any) -> bool:
        if not _is_generator(value):
            return False
        if not torch.equal(state := value.get_state(), self.tensor):
            self.tensor.copy_(state)
        return True

    def _decoded(self) -> Any:
        value = self._attributes.get(self._name)
        return (value if _is_generator(value) else torch.Generator()).set_state(self.tensor)


_ENCODED: dict[str, type[Encoded]] = {_NUMBER: _Number, _GENERATOR: _Generator}


def kept_attributes(model: torch.nn.Module, forms: Forms) -> Iterator[tuple[str, dict[str, Any], str]]:
    """The entries of `forms` that are no registered buffers: name, attributes of the module, name among these."""
    modules = dict(model.named_modules(remove_duplicate=False)) if forms else {}
    for name in sorted(forms):
        prefix, _, key = name.rpartition(".")
        if (module := modules.get(prefix)) is None or key in module._buffers:
            continue
        attribute, is_entry, index = key.partition("(")
        if (encoded := _ENCODED.get(is_entry + index)) is not None:
            yield name, encoded(module.__dict__, attribute, forms[name]), attribute
        elif is_entry:
            count = sum(other.startswith(name.removesuffix(index)) for other in forms)
            yield name, Entries(module.__dict__, attribute, count), index.rstrip(")")
        else:
            yield name, module.__dict__, key


def _tensors_of(value: Any) -> list[torch.Tensor]:
    """What can be kept of an attribute that is no number: itself, or the tensors of a tuple of tensors."""
    values = value if type(value) is tuple else (value,)
    return list(values) if all(is_tensor(one) and one.numel() for one in values) else []


def same(one: Any, other: Any) -> bool:
    """Whether two values of attributes, which may be anything, are the same."""
    if isinstance(one, torch.Tensor):
        alike = is_tensor(one) and isinstance(other, torch.Tensor) and form_of(one) == form_of(other)
        return alike and torch.equal(one, other)
    return one is other or (type(one) is type(other) and isinstance(one, (bool, int, float, str)) and one == other)


_OF_ANY_MODULE = frozenset(vars(torch.nn.Module()))
_PLAIN = (bool, int, float, str)
_TRANSIENT = (*_PLAIN, type(None), tuple, torch.dtype, torch.device)
"""Types of values that forward() makes again where it begins without them."""
_MOST_ENTRIES = 1000


def _content_of(value: Any) -> Any:
    """What tells whether a number or a text has changed, or one inside a container or an object of the script; None
    for anything else."""
    if isinstance(value, _PLAIN):
        return value
    if is_of_script(type(value).__module__) or is_of_project(type(value).__module__) or type(value) is SimpleNamespace:
        value = None if isinstance(value, torch.nn.Module) else getattr(value, "__dict__", None)
    if not isinstance(value, (list, dict, set, collections.deque)):
        return None
    entries = itertools.chain.from_iterable(value.items()) if isinstance(value, dict) else value
    return len(value), [each for each in itertools.islice(entries, _MOST_ENTRIES) if isinstance(each, _PLAIN)]


class Before:
    """The attributes of the modules of a model before the first micro-batch."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._modules = [(prefix, module, dict(vars(module))) for prefix, module in model.named_modules()]
        self._contents = [
            {name: _content_of(value) for name, value in attributes.items() if name not in _OF_ANY_MODULE}
            for _, _, attributes in self._modules
        ]
        self._versions = [
            {name: [one._version for one in _tensors_of(value)] for name, value in attributes.items()}
            for _, _, attributes in self._modules
        ]
        self._states = {
            (prefix, name): value.get_state()
            for prefix, _, attributes in self._modules
            for name, value in attributes.items()
            if _is_generator(value)
        }

    def left_in_python(self, places: set[str]) -> list[str]:
        """Numbers, texts, containers and objects that forward() has changed since, and that have no place."""
        found = []
        for (prefix, module, _), before in zip(self._modules, self._contents, strict=True):
            for key, value in vars(module).items():
                name = f"{prefix}.{key}" if prefix else key
                if key in _OF_ANY_MODULE or name + _NUMBER in places:
                    continue
                if (now := _content_of(value)) is not None and now != before.get(key):
                    found.append(name)
        return found

    def _lost(self, module: torch.nn.Module, before: dict[str, Any], contents: dict[str, Any]) -> set[type]:
        """The types of what forward() has made in a module and is not kept, without values that it may make again.

        A number that says that it was made (`is_built`, `known_length`) must be lost with it.
        """
        found = set()
        for key, value in vars(module).items():
            if key in _OF_ANY_MODULE or isinstance(value, _TRANSIENT) or _tensors_of(value) or _is_generator(value):
                continue
            is_transient = isinstance(value, torch.Tensor) and value.requires_grad
            changed = before.get(key, MISSING) is not value or _content_of(value) != contents.get(key)
            if changed and not is_transient:
                found.add(list if isinstance(value, (list, collections.deque)) else type(value))
        return found

    def left(self, places: set[str]) -> dict[str, torch.Tensor]:
        """Tensors that forward() has assigned or written to attributes since, numbers that it has changed, and states
        of generators. places: what is kept already."""
        of_model = {
            tensor.untyped_storage().data_ptr()
            for tensor in (*self._model.parameters(), *self._model.buffers())
            if type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
        }
        found: dict[str, torch.Tensor] = {}
        for (prefix, module, before), versions, contents in zip(
            self._modules, self._versions, self._contents, strict=True
        ):
            lost = self._lost(module, before, contents)
            for key, value in vars(module).items():
                if (encoded := self._encoded(prefix, key, before.get(key, MISSING), value)) is not None:
                    name, tensor = encoded
                    # A list is a record in most cases, and may be what a flag tells of.
                    is_kept = _is_generator(value) or lost <= ({list} if type(value) is not bool else set())
                    if is_kept and name not in places and key not in _OF_ANY_MODULE and not {".", "("} & set(key):
                        found[name] = tensor
                    continue
                tensors = _tensors_of(value)
                if before.get(key) is value and versions.get(key, []) == [one._version for one in tensors]:
                    continue
                if "." in key or "(" in key or any(one.untyped_storage().data_ptr() in of_model for one in tensors):
                    continue
                if not all(map(is_private, tensors)):
                    continue
                name = f"{prefix}.{key}" if prefix else key
                is_tuple = type(value) is tuple
                named = {f"{name}({index})" if is_tuple else name: one for index, one in enumerate(tensors)}
                if not places & set(named):
                    found |= {each: one for each, one in named.items() if one.nbytes > LARGEST_BYTES} or named
        return found

    def _encoded(self, prefix: str, key: str, before: Any, value: Any) -> tuple[str, torch.Tensor] | None:
        """The name and the tensor of a place for a number or a generator that has changed."""
        name = f"{prefix}.{key}" if prefix else key
        if (dtype := _dtype_of(value)) is not None:
            return None if same(before, value) else (name + _NUMBER, torch.tensor(value, dtype=dtype))
        if not _is_generator(value):
            return None
        state = value.get_state()
        is_old = (prefix, key) in self._states and torch.equal(state, self._states[prefix, key])
        return None if is_old else (name + _GENERATOR, state)
