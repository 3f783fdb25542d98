# Runs in: the host, the manager and runners.
"""Elements that are longer than their rows in the queues.

The row says where the element lies: in a memfd of the process that lives as long as the queues, which is the host (or
the service). Its beginning has two numbers, where the oldest element begins and where the last one ends. Elements
follow, each behind its number and length, on pages of their own. When steps have consumed an element, its pages are
freed; offsets are never used again.
"""

from __future__ import annotations

import functools
import io
import mmap
import os
import struct
import weakref

from accelmgr._memory.memfd import memfd_file, open_memfd
from accelmgr.errors import DataError

NAME = "accelmgr-long"
PAGE = mmap.PAGESIZE
LONG = 1 << 63
"""Set in the length of a row's element: behind it the row has PLACE."""

_ENDS = struct.Struct("<QQ")
_HEAD = struct.Struct("<QQ")
LENGTH = struct.Struct("<Q")
PLACE = struct.Struct("<IIQ")  # Process, descriptor, offset.


def _pages(size: int) -> int:
    return -(-size // PAGE) * PAGE


class LongElements:
    """One process at a time puts elements in. Others read them with read()."""

    def __init__(self, address: str = "") -> None:
        """address: of another process that keeps the memory; empty: this one does."""
        if address:
            self._pid, self._kept = map(int, address.split(":"))
            file = io.FileIO(open_memfd(self._pid, self._kept, NAME, os.O_RDWR), "r+")
            self._fd = file.fileno()
        else:
            file = memfd_file(NAME)
            self._pid, self._kept, self._fd = os.getpid(), file.fileno(), file.fileno()
            os.pwrite(self._fd, _ENDS.pack(PAGE, PAGE), 0)
        self._closing = weakref.finalize(self, file.close)

    @property
    def address(self) -> str:
        return f"{self._pid}:{self._kept}"

    def put(self, number: int, data: bytes) -> bytes:
        """Keeps element `number`, which follows all elements put so far. Returns the content of its row."""
        begin, end = _ENDS.unpack(os.pread(self._fd, _ENDS.size, 0))
        try:
            for content, offset in ((_HEAD.pack(number, len(data)), end), (data, end + _HEAD.size)):
                rest = memoryview(content)
                while rest:
                    offset += (written := os.pwrite(self._fd, rest, offset))
                    rest = rest[written:]
        except OSError as error:
            text = f"there is no memory for element {number} of the dataset, which has {len(data)} bytes: {error}"
            raise DataError(text) from error
        os.pwrite(self._fd, _ENDS.pack(begin, end + _pages(_HEAD.size + len(data))), 0)
        return LENGTH.pack(len(data) | LONG) + PLACE.pack(self._pid, self._kept, end + _HEAD.size)

    def free(self, consumed: int) -> None:
        """Frees the elements before number `consumed`."""
        begin, end = _ENDS.unpack(os.pread(self._fd, _ENDS.size, 0))
        first = begin
        while begin < end:
            number, length = _HEAD.unpack(os.pread(self._fd, _HEAD.size, begin))
            if number >= consumed:
                break
            begin += _pages(_HEAD.size + length)
        if begin == first:
            return
        os.pwrite(self._fd, _ENDS.pack(begin, end), 0)
        os.ftruncate(self._fd, _pages(end))
        with mmap.mmap(self._fd, begin - first, offset=first) as memory:
            memory.madvise(mmap.MADV_REMOVE)

    def close(self) -> None:
        """Idempotent."""
        self._closing()


class _File:
    def __init__(self, pid: int, fd: int) -> None:
        self.fd = open_memfd(pid, fd, NAME, os.O_RDWR)
        weakref.finalize(self, os.close, self.fd)


_file_of = functools.lru_cache(maxsize=8)(_File)


def element_in(row: memoryview) -> bytes | memoryview:
    """The bytes of the element in a row: those behind its length, or those that lie elsewhere."""
    (length,) = LENGTH.unpack_from(row)
    if not length & LONG:
        return row[LENGTH.size : LENGTH.size + length]
    pid, fd, offset = PLACE.unpack_from(row, LENGTH.size)
    length &= ~LONG
    parts = []
    while length:
        part = os.pread(_file_of(pid, fd).fd, min(length, 1 << 30), offset)
        if not part:
            raise DataError("an element that is longer than its row is not there any more")
        parts.append(part)
        offset += len(part)
        length -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)
