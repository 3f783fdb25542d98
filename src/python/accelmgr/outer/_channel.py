# Runs in: the host and the courier.
"""What host and courier tell each other: messages over a socket, and float32 numbers in a shared memfd.

The memfd has all parameters twice: the change that the host offers, and the outer parameters that it merges.

    host to courier    merged [LINEAGE, ROUND], used: the host has merged that, and used so many elements; the first
                       message of each courier, with is_first
                       offer [LINEAGE, ROUND], weight, since, used: the change of the next blocks is in the memfd; how
                       many elements the host had used when it began the change, and at its end
    courier to host    status: as Status
                       merge [[BLOCK, TOOK PART], ...], stands [LINEAGE, ROUND]: outer parameters are in the memfd, and
                       after them the host stands there; as before, if more blocks follow
                       beat: it lives; failed TEXT: it cannot start
                       warning TEXT: for the log
"""

from __future__ import annotations

import dataclasses
import json
import mmap
import socket
from typing import Any

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


class Given:
    """The ranges of elements that a peer was given, in a shared memfd. Only the courier adds to them."""

    BYTES = 16 << 20

    def __init__(self, fd: int) -> None:
        # How many there are, how many the reader has used when it waits for the next one, then the ranges.
        self._values = memoryview(mmap.mmap(fd, self.BYTES)).cast("q")

    def ranges(self, first: int = 0) -> list[tuple[int, int, int]]:
        """Begin, end and number of each."""
        places = range(3 * first + 2, 3 * self._values[0] + 2, 3)
        return [(self._values[place], self._values[place + 1], self._values[place + 2]) for place in places]

    def add(self, *given: int) -> None:
        count = self._values[0]
        for index, value in enumerate(given):
            self._values[3 * count + 2 + index] = value
        self._values[0] = count + 1

    def wait(self, used: int) -> None:
        """The reader has used so many ranges, and waits for another one."""
        self._values[1] = used

    @property
    def is_used_up(self) -> bool:
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
        try:
            data = self._end.recv(MOST_BYTES, 0 if may_wait else socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        except ConnectionError as error:
            raise EOFError from error
        if not data:
            raise EOFError
        message: dict[str, Any] = json.loads(data)
        return message

    def close(self) -> None:
        self._end.close()
