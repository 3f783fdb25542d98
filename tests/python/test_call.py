"""Checks Manager.call(): functions of the host that run in a runner."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from harm import Alarm
from programs import run
from torch import nn

import accelmgr
from accelmgr._changes.calls import Calls

SEEN: list[float] = []
"""forward() adds to it, in each runner to its own."""


class Metric(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.register_buffer("total", torch.zeros(()))
        self.counts: dict[str, int] = {"calls": 0}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.counts["calls"] += 1
        SEEN.append(x.sum().item())
        self.total += x.sum()
        return (self.weight * x).mean()


def seen(model: Metric) -> list[float]:
    return SEEN


def start(**options) -> accelmgr.Manager:
    return accelmgr.Manager(Metric(), list(torch.arange(1000.0)), nprocs=2, batch_size_per_device=1, **options)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_what_forward_has_left_in_a_runner_is_read_and_changed(method):
    by = 10
    with start(start_method=method, refresh="never") as manager:
        assert manager.call(lambda model: model.counts) == {"calls": 0}, "before the first step"
        for _ in range(3):
            assert manager.step().ok
        assert manager.call(lambda model: model.counts) == {"calls": 3}
        assert (manager.call(seen), manager.call(seen, rank=1)) == ([0, 2, 4], [1, 3, 5])
        assert not SEEN, "the host's own"

        def reset(model: Metric) -> torch.Tensor:
            model.counts["calls"] = by
            return model.total.clone() if model.total.zero_() == 0 else model.total

        assert manager.call(reset) == 0
        statistics = manager.statistics()
        assert (statistics.steps, statistics.elements, statistics.skips) == (3, 6, 0), "a call is no step"
        result = manager.step()
        assert result.ok and manager.model.total == 6, "element 6 alone"
        assert manager.call(lambda model: model.counts["calls"]) == by + 1


def test_errors_of_a_function_are_told_and_nothing_is_lost():
    with start() as manager:
        assert manager.step().ok
        with pytest.raises(accelmgr.ModelError, match="ZeroDivisionError"):
            manager.call(lambda model: 1 / 0)
        with pytest.raises(accelmgr.ModelError, match="cannot pickle"):
            manager.call(lambda model: (number for number in (1, 2)))
        with pytest.raises(accelmgr.UsageError, match="rank is 2; the session has ranks 0 to 1"):
            manager.call(seen, rank=2)
        file = open(os.devnull)
        with pytest.raises(accelmgr.UsageError, match="cannot be sent to a runner"), file:
            manager.call(lambda model: file)
        with pytest.raises(accelmgr.RunnerError, match="killed by signal 9"):
            manager.call(lambda model: os.kill(os.getpid(), signal.SIGKILL), rank=1)
        assert manager.step().loss == 2.5, "elements 2 and 3"
        assert manager.call(seen, rank=1) == [3], "of its replacement"


SHARED = torch.zeros(2).share_memory_()
"""Whether the first function goes on, and how often the second one was called."""


DEFINED_LATER = """
import torch, accelmgr

class Net(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x).sum()

def answer(model):
    return "old"

with accelmgr.Manager(Net(2, 1), [torch.ones(2)] * 4, nprocs=1, batch_size_per_device=1) as manager:
    def later(model):
        return type(model).__name__
    def answer(model):
        return "new"
    print(manager.call(later), manager.call(answer))
"""


def test_a_function_that_the_script_has_defined_since_is_the_one_that_is_called(tmp_path):
    assert run("-c", DEFINED_LATER, cwd=tmp_path) == (0, "Net new\n", "")


def test_a_call_after_an_interrupted_one_gets_its_own_answer(monkeypatch, alarms):
    host, put = os.getpid(), Calls.put
    SHARED.zero_()

    def first(_model: Metric) -> str:
        os.kill(host, signal.SIGUSR1)
        while not SHARED[0]:
            os.sched_yield()
        return "the first"

    def second(_model: Metric) -> str:
        SHARED[1] += 1
        return "the second"

    def put_and_go_on(self, function, forked):
        put(self, function, forked)
        SHARED[0] = float(function is second)

    monkeypatch.setattr(Calls, "put", put_and_go_on)
    with start(start_method="fork") as manager:
        for count in range(1, 4):
            with pytest.raises(Alarm):
                manager.call(first)
            assert (manager.call(second), SHARED[1].item()) == ("the second", count)
        assert manager.step().loss == 0.5
