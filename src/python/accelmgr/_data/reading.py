# Runs in: the host and the manager.
"""Reads a dataset from its beginning to its end, epoch by epoch, and goes on at a position after a restart.

No step has elements of two epochs, or of two batches of a loader: next() returns None at the end of each such part.

The position is a JSON text: how many elements were given, the states of the random generators, those of the dataset
included, and what the dataset's own state_dict() returns. With it the elements that follow are the same ones, augmented
alike:

- a dataset with load_state_dict() (torchdata's StatefulDataLoader and Hugging Face's streams have it) goes on there;
- an indexed one goes on with dataset[i];
- any other is iterated again, with the generators as they were when the epoch began, up to the position. If it gives
  other elements than the first time, its order cannot be repeated, and DataError says so.
"""

from __future__ import annotations

import base64
import collections.abc
import ctypes
import enum
import itertools
import json
import random
import struct
import sys
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from accelmgr._data import own_generators
from accelmgr._serialization.checkpoint_values import as_text, decode, encode, from_text
from accelmgr.errors import ConfigError, DataError

if "numpy" in sys.modules:
    import numpy.random  # noqa: F401  # NumPy would, at the first use: in each fork of this process.

LOOK = 4096  # Bytes of a tensor that count for its checksum: enough to tell elements apart.
_RANDOM = struct.Struct("<625I?d")
_NUMPY = struct.Struct("<624IQ?d")


def is_indexed(dataset: Any) -> bool:
    """True if the dataset has no __iter__(): elements are read as dataset[i]."""
    return not hasattr(dataset, "__iter__")


def epochs_of(dataset: Any, epochs: int | None) -> int:
    """How often the dataset is read (0: without end). Raises ConfigError if it cannot be read again."""
    if epochs is None or epochs == 1 or dataset is None or isinstance(dataset, str):  # The configuration defines it.
        return 1
    if isinstance(dataset, Iterator):
        again = f"the dataset is a {type(dataset).__name__}, which can be iterated once"
    elif is_indexed(dataset) and not hasattr(dataset, "__len__"):
        again = f"the dataset, a {type(dataset).__name__}, has no length, so its end is not known"
    else:
        return epochs
    raise ConfigError(f"data.epochs is {epochs}, but {again}; pass a list or another iterable", "data.epochs")


def _has_state(dataset: Any) -> bool:
    return callable(getattr(dataset, "state_dict", None)) and callable(getattr(dataset, "load_state_dict", None))


# Generators


def generator_states() -> bytes:
    """The states of the generators of torch, `random` and NumPy in this process."""
    _, internal, gauss = random.getstate()
    states = _RANDOM.pack(*internal, gauss is not None, gauss or 0.0)
    numpy = sys.modules.get("numpy")
    own: Any = numpy.random.get_state() if numpy is not None else ("",)
    if own[0] == "MT19937":
        _, keys, position, has_gauss, cached = own
        states += _NUMPY.pack(*keys.tolist(), position, bool(has_gauss), cached)
    return states + torch.get_rng_state().numpy().tobytes()


def seed_generators(seed: int) -> None:
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


_MT19937_BYTES = 624 * 4 + 4  # The state of NumPy's generator in memory: keys and position.


def _look() -> tuple[Any, ...]:
    """Changes when a generator draws. Costs a tenth of generator_states(), of which NumPy's part takes most time."""
    numpy = sys.modules.get("numpy")
    memory = b""
    if numpy is not None:
        bits = numpy.random.mtrand._rand._bit_generator
        if type(bits).__name__ != "MT19937":
            return (object(),)
        memory = ctypes.string_at(bits.ctypes.state_address, _MT19937_BYTES)
    return random.getstate(), memory, torch.get_rng_state().numpy().tobytes()


def set_generator_states(states: bytes) -> None:
    *internal, has_gauss, gauss = _RANDOM.unpack_from(states)
    random.setstate((3, tuple(internal), gauss if has_gauss else None))
    rest = states[_RANDOM.size :]
    own = torch.get_rng_state().numel()
    if len(rest) == own + _NUMPY.size:
        *keys, position, numpy_has_gauss, cached = _NUMPY.unpack_from(rest)
        numpy: Any = sys.modules.get("numpy")
        if numpy is not None:
            keys = numpy.array(keys, dtype=numpy.uint32)
            numpy.random.set_state(("MT19937", keys, position, int(numpy_has_gauss), cached))
    if len(rest) >= own:
        torch.set_rng_state(torch.frombuffer(bytearray(rest[len(rest) - own :]), dtype=torch.uint8))


# Elements


def checksum(value: Any, so_far: int = 0, depth: int = 4) -> int:
    """Differs, in all likelihood, for other elements. What is deep inside does not count."""
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or value.device.type != "cpu" or value.is_quantized:
            return zlib.crc32(str(value.dtype).encode(), so_far)
        few = value.detach().resolve_conj().resolve_neg().reshape(-1)[: LOOK // value.element_size()].contiguous()
        so_far = zlib.crc32(f"{value.dtype}{tuple(value.shape)}".encode(), so_far)
        return zlib.crc32(few.view(torch.uint8).numpy().data, so_far) if few.numel() else so_far
    if value is None or isinstance(value, (bool, int, float, complex, str)):
        return zlib.crc32(repr(value).encode("utf-8", "surrogatepass"), so_far)
    if isinstance(value, bytes):
        return zlib.crc32(value[:LOOK], so_far)
    if type(value).__module__ == "numpy" and hasattr(value, "tobytes") and not value.dtype.hasobject:
        return zlib.crc32(value.reshape(-1)[: max(1, LOOK // max(1, value.itemsize))].tobytes(), so_far)
    so_far = zlib.crc32(type(value).__qualname__.encode(), so_far)
    parts: Any = ()
    if depth > 0 and isinstance(value, collections.abc.Mapping):
        parts = itertools.chain.from_iterable(value.items())
    elif depth > 0 and isinstance(value, (tuple, list)):
        parts = value
    elif depth > 0 and not isinstance(value, (type, enum.Enum)):
        parts = getattr(value, "__dict__", {}).values()
    for part in parts:
        so_far = checksum(part, so_far, depth - 1)
    return so_far


def other_elements(count: int) -> DataError:
    return DataError(
        f"the dataset was read again, to go on behind element {count - 1}, but gave other elements than the first "
        "time: its order cannot be repeated, so some elements would be trained twice and others never. Shuffle with a "
        "generator that is seeded when the iteration begins (random.Random(seed + epoch)), or give the dataset "
        "state_dict() and load_state_dict(), as torchdata's StatefulDataLoader has them. If the script changes the "
        "dataset while it trains, pass iter(dataset), which the script's process reads itself"
    )


def _once(dataset: Any, position: int) -> Iterator[list[Any]]:
    """The elements of an epoch, each in a list of its own. An indexed dataset is read from `position` on."""
    if not is_indexed(dataset):
        for element in dataset:
            yield [element]
        return
    has_length = hasattr(dataset, "__len__")
    while not has_length or position < len(dataset):
        try:
            element = dataset[position]
        except (IndexError, StopIteration):
            if has_length:  # Within the length, so it is an error of the dataset and not its end.
                raise
            return
        yield [element]
        position += 1


def _encoded(value: Any) -> Any:
    tensors: dict[str, torch.Tensor] = {}
    encoded = encode(value, "the dataset's state_dict()", tensors)
    return [encoded, {path: as_text(tensor) for path, tensor in tensors.items()}]


def _decoded(saved: Any) -> Any:
    encoded, tensors = saved
    return decode(encoded, {path: from_text(text) for path, text in tensors.items()})


END_OF_BATCH = object()
"""What a dataset gives between its elements to end a step."""


class Reading:
    """The elements of a dataset, `epochs` times (0: without end). An indexed one has a length unless epochs is 1."""

    def __init__(self, dataset: Any, epochs: int = 1, restorable: bool = True) -> None:
        """restorable: position() and restore() are called, at the cost of checksums."""
        self._dataset = dataset
        self._epochs = epochs
        self._epoch = 0
        self._index = 0  # The next element's number in its epoch.
        self._count = 0  # Over all epochs.
        self._sum = 0  # The checksum of the epoch's elements so far; used if they must be read again.
        self._again = restorable and not is_indexed(dataset) and not _has_state(dataset)
        self._sums = self._again and not isinstance(dataset, (list, tuple))
        self._saved: tuple[Any, str] = None, ""
        self._own: list[torch.Generator] = dataset.own_generators() if hasattr(dataset, "own_generators") else []
        has_own = restorable and not _has_state(dataset)
        self._of_dataset = own_generators.find(dataset, self._own) if has_own else []
        self._skip: tuple[int, int] | None = None  # Elements still to be skipped, and their checksum.
        self._ended = ""  # What the last next() has found the end of: a batch or an epoch.
        self._begin_epoch()

    @property
    def count(self) -> int:
        """How many elements were given."""
        return self._count

    def _begin_epoch(self) -> None:
        self._begin = generator_states() if self._again else b""
        self._own_begin = [one.get_state() for one in self._own]
        self._dataset_begin = [one.position() for one in self._of_dataset] if self._again else []
        self._iterator = _once(self._dataset, self._index)

    def next(self) -> list[Any] | None:
        """The next element, in a list of its own. None at the end of a batch, of an epoch and of the data.

        Raises what the dataset raises.
        """
        if self._skip is not None:
            self._skip_elements(*self._skip)
        self._ended = ""
        if not self._has_epoch(self._epoch):
            return None
        boxed = next(self._iterator, None)
        if boxed is not None and boxed[0] is END_OF_BATCH:
            self._ended = "batch"
            return None
        if boxed is not None:
            self._index += 1
            self._count += 1
            if self._sums:
                self._sum = checksum(boxed[0], self._sum)
            return boxed
        if self._index == 0 and self._epoch > 0:
            raise DataError(
                f"the dataset gave no element when it was iterated again, in epoch {self._epoch + 1} (data.epochs "
                f"= {self._epochs})"
            )
        if self._index == 0:
            self._epochs = 1
        self._epoch, self._index, self._sum = self._epoch + 1, 0, 0
        if self._has_epoch(self._epoch):
            self._ended = "epoch"
            self._begin_epoch()
        return None

    def _has_epoch(self, epoch: int) -> bool:
        return self._epochs == 0 or epoch < self._epochs

    @property
    def more_epochs(self) -> bool:
        """Whether elements may follow the None that next() has just returned, or else the next None."""
        return self._ended != "" or self._has_epoch(self._epoch + 1)

    def _skip_elements(self, count: int, expected: int) -> None:
        self._skip = None
        while self._index < count:
            boxed = next(self._iterator, None)
            if boxed is None:
                break
            if boxed[0] is END_OF_BATCH:
                continue
            self._index += 1
            if self._sums:
                self._sum = checksum(boxed[0], self._sum)
        if self._index != count or self._sum != expected:
            raise other_elements(self._count)

    def position(self) -> str:
        """The position in the data, as JSON.

        Requires: no element is being read.
        """
        index, total = self._skip or (self._index, self._sum)  # _skip: no element was read since restore().
        found: dict[str, Any] = {"elements": self._count, "epoch": self._epoch, "index": index}
        look = self._begin if self._again else _look()
        if look != self._saved[0]:
            states = self._begin if self._again else generator_states()
            self._saved = look, base64.b64encode(states).decode()
        found["generators"] = self._saved[1]
        if self._own:
            found["own"] = [as_text(state) for state in self._own_begin]
        if self._of_dataset:
            found["dataset"] = self._dataset_begin or [one.position() for one in self._of_dataset]
        if self._again:
            found["checksum"] = total
        elif _has_state(self._dataset):
            found["state"] = _encoded(self._dataset.state_dict())
        return json.dumps(found)

    def restore(self, position: Mapping[str, Any]) -> None:
        """Goes on at a position() of another process that has read the same dataset.

        Requires: next() was not called.
        """
        if self._again and hasattr(self._dataset, "__next__"):  # It cannot begin again, but has just begun.
            self._count, self._skip = position["elements"], (position["index"], position["checksum"])
            return
        self._count, self._epoch, self._index = position["elements"], position["epoch"], position["index"]
        set_generator_states(base64.b64decode(position["generators"]))
        for own, state in zip(self._own, position.get("own", ()), strict=True):
            own.set_state(from_text(state))
        for generator, state in zip(self._of_dataset, position.get("dataset", ()), strict=False):
            generator.restore(state)
        if "state" in position:
            self._dataset.load_state_dict(_decoded(position["state"]))
        if self._again:
            self._skip = self._index, position["checksum"]
            self._index = self._sum = 0
        self._begin_epoch()

    def restore_index(self, count: int) -> None:
        """Goes on with element `count` of an indexed dataset, with torch's, Python's and NumPy's generators as they
        are."""
        for generator in self._of_dataset:
            generator.restore(None)
        self._count = self._index = count
        if self._epochs != 1 and len(self._dataset):
            self._epoch, self._index = divmod(count, len(self._dataset))
        self._begin_epoch()
