"""Datasets whose elements come from other threads or from the script: a fork would wait for them in vain."""

from __future__ import annotations

import collections
import itertools
import queue
import threading

import pytest
import torch
from torch import nn

import accelmgr

START = {"nprocs": 2, "start_method": "fork", "runners__threads": 1, "prefetch": 2}


class Sum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.weight * x).sum(), "sum": x.sum()}


class Fed(torch.utils.data.IterableDataset):
    """The script puts elements into it while it trains."""

    def __init__(self) -> None:
        self.rows = queue.Queue()

    def __iter__(self):
        while (row := self.rows.get()) is not None:
            yield row


class Ahead:
    """A thread of this process reads ahead, as libraries that prefetch do."""

    def __init__(self, rows) -> None:
        self.queue = queue.Queue(2)
        threading.Thread(target=self._read, args=(rows,), daemon=True).start()

    def _read(self, rows) -> None:
        for row in itertools.chain(rows, [None]):
            self.queue.put(row)

    def __iter__(self):
        return self

    def __next__(self):
        if (row := self.queue.get()) is None:
            raise StopIteration
        return row


class Replay(torch.utils.data.IterableDataset):
    """Waits until the script has added a row."""

    def __init__(self) -> None:
        self.added, self.changed = collections.deque(), threading.Condition()

    def put(self, row) -> None:
        with self.changed:
            self.added.append(row)
            self.changed.notify_all()

    def __iter__(self):
        while True:
            with self.changed:
                self.changed.wait_for(self.added.__len__)
                row = self.added.popleft()
            if row is None:
                return
            yield row


class Wrapped(torch.utils.data.IterableDataset):
    def __init__(self, dataset) -> None:
        self.dataset = dataset

    def __iter__(self):
        return iter(self.dataset)


def rows(count: int) -> list[torch.Tensor]:
    return [torch.full((1,), float(index)) for index in range(count)]


def total(result: accelmgr.StepResult) -> float:
    assert result.ok, result
    return 2 * result.scalars["sum"]  # A mean of two runners.


@pytest.mark.parametrize("kind", ["iterator", "dataset", "wrapped", "condition"])
def test_what_the_script_adds_between_steps_is_read(kind):
    dataset = Replay() if kind == "condition" else Fed()
    put = dataset.put if kind == "condition" else dataset.rows.put
    passed = {"iterator": lambda: iter(dataset.rows.get, None), "wrapped": lambda: Wrapped(dataset)}
    waiting = iter([*rows(8), None])
    for row in itertools.islice(waiting, 2):
        put(row)
    with accelmgr.Manager(Sum(), passed.get(kind, lambda: dataset)(), **START) as manager:
        assert total(manager.step(timeout=60)) == 0 + 1
        for first in (2, 4, 6):
            for row in itertools.islice(waiting, 2):
                put(row)
            assert total(manager.step(timeout=60)) == 2 * first + 1
        put(next(waiting))
        assert manager.step(timeout=60).status == "data_end"


def test_what_a_thread_reads_ahead_is_read():
    with accelmgr.Manager(Sum(), Ahead(rows(6)), **START) as manager:
        assert [total(result) for result in manager.steps(timeout=60)] == [1, 5, 9]


def test_an_iterator_goes_on_here_where_the_manager_has_stopped():
    numbers = map(torch.clone, rows(100))
    with accelmgr.Manager(Sum(), numbers, **START) as manager:
        assert total(manager.step(timeout=60)) == 1
    assert 2 <= next(numbers).item() < 50, "this process has read it, and not a copy"


class Latest(torch.utils.data.IterableDataset):
    def __init__(self) -> None:
        self.seen = [torch.zeros(1)]

    def __iter__(self):
        while True:
            yield self.seen[-1]


def test_a_changed_dataset_that_cannot_be_read_again_says_how_it_can_be_read():
    dataset = Latest()
    with accelmgr.Manager(Sum(), dataset, **{**START, "nprocs": 1, "prefetch": 0}) as manager:
        for row in rows(50)[1:]:
            result = manager.step(timeout=60)
            if not result.ok:
                break
            assert result.scalars["sum"] == row.item() - 1
            dataset.seen.append(row)
        assert "pass iter(dataset)" in result.error
