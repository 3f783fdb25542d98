# Runs in: the host and the courier.
"""What host and courier tell each other: messages over a socket, and float32 numbers in a shared memfd.

The memfd has all parameters twice: the change that the host offers, and the outer parameters that it merges.

    host to courier    merged [LINEAGE, ROUND], used: the host has merged that, and used so many elements. The first
                       message to each courier has is_first
                       offer [LINEAGE, ROUND], weight, since, used: the change of the next blocks is in the memfd; how
                       many elements the host had used when it began the change, and at its end
    courier to host    status: as Status
                       merge [[BLOCK, TOOK PART], ...], stands [LINEAGE, ROUND], replaces: outer parameters are in the
                       memfd. Where the host stands once it has merged them; if more blocks follow, where it stood
                       before. replaces: it takes them as they are, because it is new in the swarm
                       beat: it lives; failed TEXT: it cannot start; broke [ROUND, TEXT]: the outer optimizer cannot
                       make this round's step, and the courier ends
                       warning TEXT: for the log
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import mmap
import socket
from typing import Any, NamedTuple

import torch

MOST_BYTES = 1 << 17


@dataclasses.dataclass(frozen=True)
class Status:
    """Where the courier stands."""

    lineage: str = ""
    round: int = 0
    participants: int = 0
    total_weight: float = 0.0
    digest: str = ""
    waiting_for: str = "the courier, which starts"
    blocks: tuple[int, int] = (0, 0)
    is_ready: bool = False
    """Whether the host may offer a change: no other peer is ahead."""
    is_awaited: bool = False
    """Whether others have offered a change to the next round, and this peer has not."""
    address: str = ""


class Numbers:
    """The shared memfd."""

    def __init__(self, fd: int, sizes: list[int]) -> None:
        self._memory = mmap.mmap(fd, max(1, 8 * sum(sizes)))
        both = torch.frombuffer(self._memory, dtype=torch.float32) if sum(sizes) else torch.zeros(0)
        self._begins = [sum(sizes[:index]) for index in range(len(sizes) + 1)]
        self._changes, self._merges = both[: sum(sizes)], both[sum(sizes) :]

    def change(self, blocks: tuple[int, int]) -> torch.Tensor:
        """Of these blocks, one after the other."""
        return self._changes[self._begins[blocks[0]] : self._begins[blocks[1]]]

    def outer(self, block: int) -> torch.Tensor:
        return self._merges[self._begins[block] : self._begins[block + 1]]


class Range(NamedTuple):
    """Elements that a peer was given."""

    begin: int
    end: int
    number: int
    """See Leases."""
    place: int
    """How many elements the ranges before it have."""

    @property
    def size(self) -> int:
        return self.end - self.begin


class Given:
    """The ranges that a peer was given, in a shared memfd: the last MOST of them. Only the courier adds to them."""

    MOST = 1 << 19
    BYTES = 4 * 8 * (1 + MOST)

    def __init__(self, fd: int) -> None:
        # How many there were, the range at which the reader is, how many of its elements it has read; then the ranges.
        self._values = memoryview(mmap.mmap(fd, self.BYTES)).cast("q")

    def ranges(self, first: int = 0) -> list[Range]:
        """From the one with this place on, which may be gone."""
        count = self._values[0]
        slots = [4 * (1 + place % self.MOST) for place in range(max(first, count - self.MOST), count)]
        return [Range(*self._values[slot : slot + 4]) for slot in slots]

    def last(self) -> list[Range]:
        """The last one, if there is one."""
        return self.ranges(max(0, self._values[0] - 1))

    def add(self, begin: int, end: int, number: int) -> Range:
        count = self._values[0]
        added = Range(begin, end, number, sum(each.place + each.size for each in self.last()))
        for index, value in enumerate(added):
            self._values[4 * (1 + count % self.MOST) + index] = value
        self._values[0] = count + 1
        return added

    @property
    def reader(self) -> tuple[int, int]:
        """How many ranges the reader has read, and how many elements of the next one."""
        return self._values[1], self._values[2]

    @reader.setter
    def reader(self, reader: tuple[int, int]) -> None:
        self._values[1], self._values[2] = reader

    @property
    def is_used_up(self) -> bool:
        """Whether the reader waits for another range."""
        return 0 < self._values[0] == self._values[1]


class Channel:
    """One end of the socket. Not for several threads, except receive()."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    def fileno(self) -> int:
        return self._end.fileno()

    def send(self, **message: Any) -> bool:
        """Never blocks. Returns False if the other end has not read for long; raises OSError if it has gone."""
        try:
            self._end.send(json.dumps(message).encode(), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            return True
        except BlockingIOError:
            return False

    def receive(self, may_wait: bool) -> dict[str, Any] | None:
        """None: there is no message. Raises EOFError when the other end has gone."""
        data = None
        while data is None:
            try:
                data = self._end.recv(MOST_BYTES, 0 if may_wait else socket.MSG_DONTWAIT)
            except BlockingIOError:
                return None
            except ConnectionResetError:  # Said once, if the other end had not read all; what it has sent follows.
                continue
            except OSError as error:
                raise EOFError from error
        if not data:
            raise EOFError
        message: dict[str, Any] = json.loads(data)
        return message

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)  # Forks of this process may have it, too.
        self._end.close()
