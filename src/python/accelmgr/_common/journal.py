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
from typing import Any

from accelmgr._common.memfd import open_memfd
from accelmgr._common.pickling import KnownPickler, KnownUnpickler

NAME = "accelmgr-journal"
HEAD = struct.Struct("<Q?")  # The length of an entry, and whether it is of settings.
SETTINGS = "settings"

Entry = tuple[str, Any]
"""Of what kind it is, and its content."""


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
        KnownPickler(file, known).dump(entry)
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
        self._fd = open_memfd(pid, fd, NAME)
        self._read = 0

    def entries(self, end: int, known: Callable[[], Mapping[Any, Any]]) -> Iterator[Entry]:
        """Those that were not read yet, up to `end`. known: what the names of write() stand for here and now."""
        while self._read < end:
            data, _ = self._next()
            yield KnownUnpickler(io.BytesIO(data), known()).load()

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
