# Runs in: the host, which publishes; runners, which read.
"""What the host has changed since its runners began, as far as values say it: attributes of modules, tensors of the
script, settings of torch.

Each publication holds all such changes, in a memfd of its own, so it does not grow with the steps, and a runner that
replaces another finds all of them. Before a step the host tells the runners which publication is the present one.
"""

from __future__ import annotations

import io
import itertools
import mmap
import os
import pickle
import struct
import weakref
from collections.abc import Iterator
from typing import Any

import cloudpickle

from accelmgr._memory.memfd import memfd_file, open_memfd

PUBLISHED = "<published>"
"""The name of a buffer that the model does not have: the place of the present publication."""
PLACE = struct.Struct("<II")
"""The host's descriptor of a publication, and its number."""
NOTHING = bytes(PLACE.size)

Key = tuple[str, ...]
"""("attribute", path of a module, name), ("tensor", its number), ("setting", name), or ("order",), the Order of an
inner step."""


def _name(number: int) -> str:
    return f"accelmgr-record-{number}"


class Record:
    """The side of the host."""

    def __init__(self) -> None:
        self._entries: dict[Key, tuple[int, Any]] = {}
        self._number = 0
        self._files: list[io.FileIO] = []
        self._closing = weakref.finalize(self, _close, self._files)  # Also if the manager is never stopped.
        self.place = NOTHING

    def publish(self, changes: dict[Key, Any]) -> None:
        """Raises what pickling raises; then the previous publication stays the present one."""
        number = self._number + 1
        entries = self._entries | {key: (number, value) for key, value in changes.items()}
        buffers: list[memoryview] = []
        data = cloudpickle.dumps(entries, 5, lambda buffer: buffers.append(buffer.raw()))
        sizes = [len(data), *(buffer.nbytes for buffer in buffers)]
        file = memfd_file(_name(number))
        _write(file.fileno(), [struct.pack(f"<{len(sizes) + 1}Q", len(sizes), *sizes), data, *buffers])
        self._files.append(file)
        if len(self._files) > 2:  # A runner whose attempt was aborted may still read the one before.
            self._files.pop(0).close()
        self._entries, self._number = entries, number
        self.place = PLACE.pack(file.fileno(), number)

    def clear(self) -> None:
        """Runners that begin from now on know all changes."""
        self._entries = {}
        self.place = NOTHING

    def close(self) -> None:
        """Idempotent."""
        _close(self._files)


def _write(fd: int, parts: list[bytes | memoryview]) -> None:
    at = 0
    for part in parts:
        left = memoryview(part)
        while left:
            count = os.pwrite(fd, left, at)
            left, at = left[count:], at + count


def _parts(content: memoryview) -> list[memoryview]:
    """The parts in a publication: a pickle, and the buffers that it refers to."""
    (count,) = struct.unpack_from("<Q", content)
    ends = itertools.accumulate(struct.unpack_from(f"<{count}Q", content, 8), initial=8 * (count + 1))
    return [content[begin:end] for begin, end in itertools.pairwise(ends)]


def _close(files: list[io.FileIO]) -> None:
    while files:
        files.pop().close()


class Reader:
    """The side of a runner."""

    def __init__(self, pid: int) -> None:
        """pid: the host's."""
        self._pid = pid
        self._read = 0

    def changes(self, place: bytes) -> Iterator[tuple[Key, Any]]:
        """The changes of the publication at `place` that were not read yet."""
        fd, number = PLACE.unpack(place)
        if number == 0:
            return
        with os.fdopen(open_memfd(self._pid, fd, _name(number)), "rb") as file:
            parts = _parts(memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)))
        entries = pickle.loads(parts[0], buffers=parts[1:])
        for key, (since, value) in entries.items():
            if since > self._read:
                yield key, value
        self._read = number
