# Runs in: the host, which writes; the manager and runners, which read.
"""What the host has changed since the start, in the order in which it did: a memfd of the host that only grows.

Runners read up to the place that the host tells them before a step, so a runner that replaces another gets there, too.
"""

from __future__ import annotations

import io
import os
import pickle
import struct
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, BinaryIO

import cloudpickle
import torch

NAME = "accelmgr-journal"
HEAD = struct.Struct("<Q?")  # The length of an entry, and whether it is of settings.
SETTINGS = "settings"

Entry = tuple[str, Any]
"""Of what kind it is, and its content."""


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    def __init__(self, file: BinaryIO, known: Mapping[int, Any]) -> None:
        super().__init__(file)
        self._known = known

    def persistent_id(self, obj: Any) -> Any:
        return self._known.get(id(obj)) if isinstance(obj, (torch.Tensor, torch.nn.Module)) else None


def is_picklable(value: Any, known: Mapping[int, Any]) -> bool:
    try:
        _Pickler(io.BytesIO(), known).dump(value)
    except Exception:
        return False
    return True


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: BinaryIO, known: Mapping[Any, Any]) -> None:
        super().__init__(file)
        self._known = known

    def persistent_load(self, pid: Any) -> Any:
        return self._known[pid]


class Journal:
    """The side of the host."""

    def __init__(self) -> None:
        self._fd = os.memfd_create(NAME, os.MFD_CLOEXEC)
        self._closing = weakref.finalize(self, os.close, self._fd)  # Also if the manager is never stopped.
        self.end = 0
        self.settings: dict[str, Any] = {}
        """Those with which runners start."""

    @property
    def address(self) -> str:
        return f"{os.getpid()}:{self._fd}"

    def write(self, entry: Entry, known: Mapping[int, Any]) -> None:
        """known: names of modules and tensors that readers have themselves, by id(). Raises what pickling raises."""
        if self._fd < 0:
            return
        file = io.BytesIO()
        _Pickler(file, known).dump(entry)
        data = HEAD.pack(file.tell(), entry[0] == SETTINGS) + file.getvalue()
        os.ftruncate(self._fd, self.end)  # Of an entry that was not written as a whole.
        if os.pwrite(self._fd, data, self.end) != len(data):  # At once: another process may be reading.
            raise MemoryError(f"a change of {len(data)} bytes does not fit into memory")
        self.end += len(data)

    def close(self) -> None:
        """Idempotent."""
        self._closing()
        self._fd = -1


class Reader:
    """The side of a runner."""

    def __init__(self, address: str) -> None:
        pid, fd = address.split(":")
        link = f"/proc/{pid}/fd/{fd}"
        if os.readlink(link) != f"/memfd:{NAME} (deleted)":
            raise FileNotFoundError(link)
        self._fd = os.open(link, os.O_RDONLY | os.O_CLOEXEC)
        self._read = 0

    def entries(self, end: int, known: Callable[[], Mapping[Any, Any]]) -> Iterator[Entry]:
        """Those that were not read yet, up to `end`. known: what the names of write() stand for here and now."""
        while self._read < end:
            data, _ = self._next()
            yield _Unpickler(io.BytesIO(data), known()).load()

    def settings(self) -> Iterator[Any]:
        """The values of entries of settings that were not read yet; leaves all others out."""
        while self._read + HEAD.size <= os.fstat(self._fd).st_size:
            data, is_of_settings = self._next()
            if is_of_settings:
                yield pickle.loads(data)[1]

    def _next(self) -> tuple[bytes, bool]:
        length, is_of_settings = HEAD.unpack(os.pread(self._fd, HEAD.size, self._read))
        data = os.pread(self._fd, length, self._read + HEAD.size)
        self._read += HEAD.size + length
        return data, is_of_settings
