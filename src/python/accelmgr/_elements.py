"""The elements of a dataset, for the loader of a manager process."""

from __future__ import annotations

import collections.abc
import copy
import pickle
import struct
from collections.abc import Callable, Iterator
from typing import Any

import torch

from accelmgr._feed import Client, FeedAddress, elements_of, is_indexed
from accelmgr._memory import dtype_name
from accelmgr.errors import DataError

# Field names that encode the kind of an element. The fields of a mapping have its own keys.
PICKLED = "<pickled>"
ALONE = "<element>"
ITEM = "<{}>"


def structure_of(element: Any) -> tuple[list[str], list[Any]]:
    """Names and values of an element."""
    if isinstance(element, (tuple, list)):
        return [ITEM.format(index) for index in range(len(element))], list(element)
    if isinstance(element, collections.abc.Mapping):
        return [str(name) for name in element], list(element.values())
    return [ALONE], [element]


def restore_structure(fields: list[tuple[str, torch.Tensor]]) -> Any:
    """Rebuilds the element that structure_of() took apart."""
    if fields[0][0] == ALONE:
        return fields[0][1]
    if fields[0][0] == ITEM.format(0):
        return tuple(tensor for _, tensor in fields)
    return dict(fields)


def mapped(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """`value` with each tensor replaced, also in nested mappings, lists and tuples."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, collections.abc.MutableMapping):
        same = copy.copy(value)  # Of its own type, for example transformers' BatchEncoding.
        for key, entry in value.items():
            same[key] = mapped(function, entry)
        return same
    if isinstance(value, collections.abc.Mapping):
        return {key: mapped(function, entry) for key, entry in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(mapped(function, entry) for entry in value))
    if type(value) in (tuple, list):
        return type(value)(mapped(function, entry) for entry in value)
    return value


def as_tensor(value: Any) -> torch.Tensor | None:
    """`value` as a contiguous tensor on the CPU; None if it cannot be one."""
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided:
            return None
        tensor = value if value.is_cpu and not value.requires_grad else value.detach().cpu()
        if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
            return tensor
        return tensor.contiguous().resolve_conj().resolve_neg()
    if isinstance(value, float):  # float64, as default_collate makes it.
        return torch.tensor(value, dtype=torch.float64)
    if isinstance(value, (bool, int)) or type(value).__module__ == "numpy":
        return torch.as_tensor(value)
    return None


class Elements:
    """Reads a dataset element by element, as one tensor for each field.

    With a collate_fn, and if elements have fields that are no tensors, each element is pickled bytes instead.
    """

    LENGTH = struct.Struct("<Q")

    def __init__(self, dataset: Any, options: dict[str, Any]) -> None:
        self._dataset = dataset.connect() if isinstance(dataset, FeedAddress) else dataset
        self._fed = isinstance(self._dataset, Client)
        self._restorable = self._fed or is_indexed(dataset)
        self.length = -1  # The length of an indexed dataset, 0 if it has none; -1: not indexed.
        if not self._fed and is_indexed(dataset):
            self.length = len(dataset) if hasattr(dataset, "__len__") else 0
        self._position = 0
        self._names: list[str] = []
        self._items = 0  # The length of elements that are tuples or lists.
        self._as_bytes = bool(options["as_bytes"])
        self._limit = int(options["max_element_bytes"])
        self._epochs = int(options.get("epochs", 1))
        self._iterator = self._iterate(0)
        self._first: list[Any] | None = None
        data = self._dataset.example() if self._fed else None
        first = next(self._iterator, None) if not self._fed else None if data is None else [pickle.loads(data)]
        if first is None:
            raise DataError("the dataset has no elements")
        tensors: list[torch.Tensor] = []
        if not self._as_bytes:
            self._names, values = structure_of(first[0])
            tensors = [tensor for value in values if (tensor := as_tensor(value)) is not None]
            self._as_bytes = not tensors or len(tensors) < len(values)
            self._items = len(values) if isinstance(first[0], (tuple, list)) else 0
        if self._as_bytes:
            size = len(self._dump(data if self._fed else first[0]))
            self._limit = self._limit or max(64 * 1024, 4 * size)
            self._fields = [(PICKLED, torch.uint8, torch.Size([self._limit]))]
        else:
            named = zip(self._names, tensors, strict=True)
            self._fields = [(name, tensor.dtype, tensor.shape) for name, tensor in named]
        self._first = None if self._fed else first

    def _iterate(self, position: int) -> Iterator[list[Any]]:
        """Yields elements from `position` on, each in a list. Those of a feed stay bytes if elements are bytes."""
        if not self._fed:
            yield from elements_of(self._dataset, position, self._epochs)
            return
        while (data := self._dataset.get(position)) is not None:
            yield [data if self._as_bytes else pickle.loads(data)]
            position += 1

    def _dump(self, element: Any) -> bytes:
        data = element if self._fed else pickle.dumps(element, protocol=pickle.HIGHEST_PROTOCOL)
        return self.LENGTH.pack(len(data)) + data

    @property
    def fields(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """Name, dtype and shape of each field."""
        return [(name, dtype_name(dtype), tuple(shape)) for name, dtype, shape in self._fields]

    def next(self) -> list[Any] | None:
        """The next element: a dense tensor for each field, or bytes; None at the end."""
        boxed, self._first = self._first or next(self._iterator, None), None
        if boxed is None:
            return None
        self._position += 1
        element = boxed[0]
        if self._as_bytes:
            data = self._dump(element)
            if len(data) > self._limit:
                raise DataError(
                    f"element {self._position - 1} of the dataset takes {len(data)} bytes, more than "
                    f"max_element_bytes = {self._limit}"
                )
            return [data]
        if self._items and type(element) in (tuple, list) and len(element) == self._items:
            values = element
        else:
            names, values = structure_of(element)
            if names != self._names:
                raise DataError(
                    f"element {self._position - 1} of the dataset has {', '.join(names)}, the first one "
                    f"{', '.join(self._names)}; all elements must have the same fields, unless a collate_fn is passed"
                )
        tensors = [as_tensor(value) for value in values]
        for (name, dtype, shape), tensor in zip(self._fields, tensors, strict=True):
            if tensor is None or tensor.dtype != dtype or tensor.shape != shape:
                found = "not a tensor" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
                raise DataError(
                    f"field '{name}' of element {self._position - 1} of the dataset is {found}, that of the first "
                    f"one {dtype} {list(shape)}; pass a collate_fn if elements differ"
                )
        return tensors

    def state(self) -> str | None:
        """The position in a dataset that is indexed or fed; None for any other, which cannot be restored."""
        return str(self._position) if self._restorable else None

    def restore(self, state: str) -> None:
        if not self._restorable or not state.isdigit():
            raise DataError(f"the dataset cannot be resumed at '{state}'")
        self._position = int(state)
        self._iterator = self._iterate(self._position)
        self._first = None
