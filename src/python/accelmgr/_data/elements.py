# Runs in: the manager, which reads elements; runners, which take them apart.
"""The elements of a dataset, for the loader of a manager process."""

from __future__ import annotations

import collections.abc
import copy
import json
import operator
import pickle
from collections.abc import Callable
from typing import Any

import torch

from accelmgr._data.feed import Client, FeedAddress
from accelmgr._data.loaders import Collated, LoaderElements, dumped, loaded
from accelmgr._data.long_elements import LENGTH, PLACE, LongElements
from accelmgr._data.reading import Reading, is_indexed, other_elements, set_generator_states
from accelmgr._memory.tensors import dtype_name
from accelmgr.errors import DataError

# Field names that encode the kind of an element. The fields of a mapping have its own keys.
PICKLED = "<pickled>"
ALONE = "<element>"
ITEM = "<{}>"

NUMBERS = "biufc"  # NumPy's dtype.kind of bool, int, unsigned, float and complex: torch makes tensors of these.
REMEDY = "pass a collate_fn if elements differ: torch.utils.data.default_collate, or one of your own"
ROOM = 64 * 1024  # The least room of a row for a pickled element, in bytes.


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


def collated(collate_fn: Callable[[list[Any]], Any], elements: list[Any]) -> Any:
    """The batch of these elements, as restore_structure() gives it. A list of the elements themselves, which
    default_collate returns for texts, is one argument of the model."""
    if isinstance(elements[0], Collated):
        return elements[0].batch
    batch = collate_fn(elements)
    if type(batch) is list and len(batch) == len(elements) and all(map(operator.is_, batch, elements)):
        return (batch,)
    return batch


def mapped(
    function: Callable[[torch.Tensor], Any], value: Any, of_others: Callable[[Any], Any] = lambda value: value
) -> Any:
    """`value` with each tensor replaced, also in nested mappings, lists and tuples. of_others: replaces all other
    values."""

    def of(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return function(value)
        if isinstance(value, collections.abc.MutableMapping):
            same = copy.copy(value)  # Of its own type, for example transformers' BatchEncoding.
            for key, entry in value.items():
                same[key] = of(entry)
            return same
        if isinstance(value, collections.abc.Mapping):
            return {key: of(entry) for key, entry in value.items()}
        if isinstance(value, torch.nn.utils.rnn.PackedSequence):  # torch wants its batch_sizes on the CPU.
            return type(value)(of(value.data), value.batch_sizes, of(value.sorted_indices), of(value.unsorted_indices))
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*(of(entry) for entry in value))
        if type(value) in (tuple, list):
            return type(value)(of(entry) for entry in value)
        return of_others(value)

    return of(value)


def tensors_in(inputs: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []

    def noted(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    mapped(noted, inputs)
    return found


def as_tensor(value: Any) -> torch.Tensor | None:
    """`value` as a contiguous tensor on the CPU, as default_collate makes it of numbers; None if it cannot be one."""
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided:
            return None
        tensor = value if value.is_cpu and not value.requires_grad else value.detach().cpu()
        if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
            return tensor
        return tensor.contiguous().resolve_conj().resolve_neg()
    if type(value) is float:  # float64, as default_collate makes it.
        return torch.tensor(value, dtype=torch.float64)
    if type(value) in (bool, int):
        return torch.as_tensor(value)
    if type(value).__module__ == "numpy" and getattr(getattr(value, "dtype", None), "kind", "") in NUMBERS:
        return torch.as_tensor(value)
    return None


def _check_collated(element: Any) -> None:
    """Raises DataError for an element of which torch's default_collate makes no batch."""
    try:
        torch.utils.data.default_collate([element])
    except (TypeError, RuntimeError) as error:
        raise DataError(
            f"no batch can be made of the dataset's elements, of which the first is a {type(element).__name__}: "
            f"{error}; pass a collate_fn"
        ) from error


class Elements:
    """Reads a dataset element by element, as one tensor for each field.

    With a collate_fn, and if elements have fields that are no tensors, each element is pickled bytes instead.
    """

    def __init__(self, dataset: Any, options: dict[str, Any]) -> None:
        self._client: Client | None = dataset.connect() if isinstance(dataset, FeedAddress) else None
        if isinstance(dataset, LoaderElements):
            set_generator_states(dataset.generators)
        self._reading = None if self._client is not None else Reading(dataset, int(options.get("epochs", 1)))
        self._is_indexed = self._client is None and is_indexed(dataset)
        self.length = -1  # The length of an indexed dataset, 0 if it has none; -1: not indexed.
        if self._is_indexed:
            self.length = len(dataset) if hasattr(dataset, "__len__") else 0
        self._position = 0
        # restore() sets it: the checksum of all earlier elements that a feed must state with its next one.
        self._expected_sum: int | None = None
        self._names: list[str] = []
        self._items = 0  # The length of elements that are tuples or lists.
        self._as_bytes = bool(options["as_bytes"])
        self._limit = int(options["max_element_bytes"])
        self._long: LongElements | None = None
        self._has_long = False
        self._beginning = self._reading.position() if self._reading is not None else ""
        data = self._client.example() if self._client is not None else None
        first = self._reading.next() if self._reading is not None else None if data is None else [pickle.loads(data)]
        if first is None:
            raise DataError("the dataset has no elements")
        example = loaded(first[0])
        is_collated = isinstance(example, Collated)
        if is_collated:  # A batch is no element that a user could limit.
            self._as_bytes, self._limit = True, 0
        tensors: list[torch.Tensor] = []
        if not self._as_bytes:
            self._names, values = structure_of(example)
            tensors = [tensor for value in values if (tensor := as_tensor(value)) is not None]
            self._as_bytes = not tensors or len(tensors) < len(values)
            self._items = len(values) if type(example) in (tuple, list) else 0
            if self._as_bytes:
                _check_collated(example)
        if self._as_bytes:
            size = LENGTH.size + len(data if data is not None else dumped(first[0]))
            room = self._limit or (LENGTH.size + PLACE.size if is_collated else max(ROOM, 4 * size))
            if not self._limit:  # A longer element lies elsewhere.
                self._long = LongElements(options.get("long", ""))
            self._fields = [(PICKLED, torch.uint8, torch.Size([room]))]
            self._room = room
        else:
            named = zip(self._names, tensors, strict=True)
            self._fields = [(name, tensor.dtype, tensor.shape) for name, tensor in named]
        self._first = None if self._client is not None else first

    def _read(self) -> list[Any] | None:
        """The next element in a list. An element of a feed that is to be bytes stays the bytes that the feed sent."""
        if self._reading is not None:
            boxed, self._first = self._first or self._reading.next(), None
            return boxed
        assert self._client is not None
        data = self._client.get(self._position)
        expected, self._expected_sum = self._expected_sum, None
        if expected is not None and self._client.sums is not None and self._client.sums[0] != expected:
            raise other_elements(self._position)
        if data is None:
            return None
        return [data if self._as_bytes else pickle.loads(data)]

    def _row_of(self, element: Any) -> bytes:
        data = element if self._client is not None else dumped(element)
        if LENGTH.size + len(data) <= self._room:
            return LENGTH.pack(len(data)) + data
        number = self._position - 1
        if self._long is None:
            raise DataError(
                f"element {number} of the dataset takes {LENGTH.size + len(data)} bytes, more than max_element_bytes = "
                f"{self._limit}"
            )
        self._has_long = True
        return self._long.put(number, data)

    @property
    def more_epochs(self) -> bool:
        """As Reading.more_epochs."""
        return (
            self._reading.more_epochs if self._reading is not None else self._client is not None and self._client.more
        )

    @property
    def fields(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """Name, dtype and shape of each field."""
        return [(name, dtype_name(dtype), tuple(shape)) for name, dtype, shape in self._fields]

    def next(self, consumed: int = 0) -> list[Any] | None:
        """The next element: a dense tensor for each field, or bytes; None at the end of the data, or of a part.

        consumed: how many elements steps have consumed.
        """
        if self._has_long and self._long is not None:
            self._long.free(consumed)
        boxed = self._read()
        if boxed is None:
            return None
        self._position += 1
        element = boxed[0]
        if self._as_bytes:
            return [self._row_of(element)]
        element = loaded(element)
        if self._items and type(element) in (tuple, list) and len(element) == self._items:
            values = element
        else:
            names, values = structure_of(element)
            if names != self._names and sorted(names) == sorted(self._names):
                by_name = dict(zip(names, values, strict=True))
                names, values = self._names, [by_name[name] for name in self._names]
            if names != self._names:
                raise DataError(
                    f"element {self._position - 1} of the dataset has {', '.join(names)}, the first one "
                    f"{', '.join(self._names)}; {REMEDY}"
                )
        tensors = [as_tensor(value) for value in values]
        for (name, dtype, shape), tensor in zip(self._fields, tensors, strict=True):
            if tensor is None or tensor.dtype != dtype or tensor.shape != shape:
                found = "not a tensor" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
                raise DataError(
                    f"field '{name}' of element {self._position - 1} of the dataset is {found}, that of the first "
                    f"one {dtype} {list(shape)}; {REMEDY}"
                )
        return tensors

    def state(self) -> str:
        """The position in the dataset."""
        if self._client is not None:
            sums = self._client.sums if self._position else (0, 0)
            return json.dumps({"elements": self._position} | ({"checksum": sums[1]} if sums is not None else {}))
        assert self._reading is not None
        return self._beginning if self._first is not None else self._reading.position()

    def restore(self, state: str) -> None:
        """Goes on at a state(); of an indexed dataset also at a number alone, as earlier versions have saved it."""
        if state.isdigit() and (self._client is not None or self._is_indexed):
            self._position = int(state)
            if self._reading is not None:
                self._reading.restore_index(self._position)
                self._first = None
            if self._client is not None:
                self._client.sums = None
            return
        try:
            position = json.loads(state)
            self._position = position["elements"]
            if self._client is not None:
                self._expected_sum = position.get("checksum")
                self._client.sums = None if self._expected_sum is None else (0, self._expected_sum)
                return
            assert self._reading is not None
            self._reading.restore(position)
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"the dataset cannot be resumed at '{state[:200]}'") from error
        self._first = None
