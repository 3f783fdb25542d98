# Runs in: the host, or the process that reads the data.
"""A dataset of which each peer of a swarm has another part."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from accelmgr._memory.memfd import memfd_file
from accelmgr.errors import ConfigError
from accelmgr.outer._channel import Given
from accelmgr.outer._leases import FIRST

POLL_S = 0.05


class Leased(torch.utils.data.IterableDataset[Any]):
    """Elements of `dataset` that the swarm leases to this peer: give it to Manager as dataset, and to DiLoCo as `data`.

    Each round says which elements each peer uses next, so no two peers use the same one. When a peer is gone,
    elements that it has not used are leased again, and so are those of a change that no round has. After the last
    element the first one follows. A peer that has used all it holds, because no round is made, uses that again. The
    first changes of one that comes back after its elements were leased to others are left out of rounds.

    dataset: the same in all peers, with __len__() and __getitem__(); its order is theirs.
    hold: how many elements a peer holds after each round. Make it at least as many as it uses in two rounds.

    state: that of DiLoCo, if there is one: the elements that the swarm of before has read are not read again.

    Raises ConfigError: hold is not positive, or there is no element.
    """

    def __init__(
        self, dataset: torch.utils.data.Dataset[Any], hold: int, state: Mapping[str, Any] | None = None
    ) -> None:
        if hold < 1:
            raise ConfigError(f"hold is {hold}; it must be at least 1", "hold")
        if len(dataset) == 0:  # type: ignore[arg-type]
            raise ConfigError("dataset has no element", "dataset")
        self._dataset, self.hold = dataset, hold
        self._file = memfd_file("accelmgr-outer-leases")
        self._file.truncate(Given.BYTES)
        self._given = Given(self.fd)
        self._name, self._begin = uuid.uuid4().hex, (0, 0)
        self.first = first = 0 if state is None else state["next_element"]
        self._given.add(
            first, first + hold, FIRST
        )  # The manager reads before it is in a swarm; the lease of one that is alone.

    @property
    def fd(self) -> int:
        """Of the memory that tells what this peer has."""
        return self._file.fileno()

    def __iter__(self) -> Iterator[Any]:
        workers = torch.utils.data.get_worker_info()
        if workers is not None and workers.num_workers > 1:
            count = workers.num_workers
            raise ConfigError(f"num_workers is {count}; it must be at most 1: each worker reads all that is leased")
        size = len(self._dataset)  # type: ignore[arg-type]
        place, read = self._begin
        while True:
            for given in self._given.ranges(place):
                for number in range(given.begin + read, given.end):
                    read += 1
                    self._given.reader = place, read
                    yield self._dataset[number % size]
                place, read = place + 1, 0
                self._given.reader = place, read
            time.sleep(POLL_S)  # The courier is another process.

    def state_dict(self) -> dict[str, Any]:
        """Where the reader is, for the manager: one that takes another's place goes on there."""
        return {"of": self._name, "reader": list(self._given.reader)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """That of another machine, or of one that has started again, says nothing here: that one was another peer."""
        if state["of"] == self._name:
            place, read = state["reader"]
            self._begin = self._given.reader = place, read
