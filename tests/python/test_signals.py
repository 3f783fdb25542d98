"""Checks that a signal handler which raises loses nothing, wherever the interpreter calls it in a call of a manager."""

import contextlib
import os
import pathlib
import random
import signal
import sqlite3

import pytest
import torch
from gate import Count
from interruptions import Interrupted, interrupted_at
from programs import run
from torch import nn

import accelmgr
from accelmgr.compat.tpu_manager import TPUManager


class Sees(nn.Module):
    """The gradient of `weight` is the mean of the elements; `seen` counts micro-batches."""

    def __init__(self):
        super().__init__()
        self.weight, self.unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
        self.norm = nn.BatchNorm1d(2, affine=False)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("last", torch.zeros(2))

    def forward(self, x):
        self.seen += 1
        self.last = x.mean(0)
        self.norm(x)
        return (self.weight * x).mean(0).sum()


def generated():
    yield from Count()


class Account:
    """Compares a manager with the steps that it has told of."""

    def __init__(self, manager, model):
        self._manager, self._model = manager, model
        self._norm = nn.BatchNorm1d(2, affine=False)
        self._steps = 0
        self._gradient = None

    def note(self, result, accumulate=True):
        """result: what a step returned, or what was raised in it."""
        if isinstance(result, BaseException):
            result = getattr(result, "step_result", None)
        if result is not None and result.counted:
            x = torch.tensor([[2.0 * self._steps, 1.0], [2.0 * self._steps + 1, 1.0]])
            self._norm(x)
            self._steps += 1
            self._gradient = x.mean(0) + (self._gradient if accumulate and self._gradient is not None else 0)

    def zeroed(self):
        self._gradient = None

    def check(self, where):
        told, seen = self._manager.statistics().steps, self._model.seen.item()
        assert (told, seen) == (self._steps, self._steps), where
        gradient = self._model.weight.grad
        assert (gradient is None) == (self._gradient is None), where
        assert gradient is None or torch.equal(gradient, self._gradient), where
        assert torch.equal(self._model.norm.running_mean, self._norm.running_mean), where
        assert self._model.last[0] == 2 * self._steps - 1.5, where


def check_each_place(manager, model, step, accumulate=True, zeroes=True):
    account = Account(manager, model)
    account.note(manager.step())
    places = 0
    while True:
        where, result = interrupted_at(places, step)
        account.note(result, accumulate)
        account.check(where)
        if not where:
            break
        places += 1
        if zeroes and places % 3 == 0:
            manager.zero_grad()
            account.zeroed()
    assert places > 100  # It was interrupted inside.
    account.note(manager.step())
    account.check("afterwards")


OPTIONS = {"nprocs": 1, "batch_size_per_device": 2}


STEPS = {
    "adds": (Count, lambda manager: manager.step()),
    "overwrites with a dataset that the host reads": (generated, lambda manager: manager.step(accumulate=False)),
    "is not given by steps()": (Count, lambda manager: next(manager.steps())),
}


@pytest.mark.parametrize("kind", STEPS)
def test_a_step_tells_of_itself_at_each_place(kind):
    dataset, step = STEPS[kind]
    model = Sees()
    with accelmgr.Manager(model, dataset(), runners__threads=1, **OPTIONS) as manager:
        check_each_place(manager, model, lambda: step(manager), accumulate=dataset is Count)


class Frozen(nn.Module):
    """Each of `parts` is added to what is trained when it requires a gradient."""

    def __init__(self, count):
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.zeros(2), requires_grad=i == 0) for i in range(count))

    def forward(self, x):
        return (sum(self.parts) * x).sum()


def test_a_step_that_makes_a_gradient_for_what_was_frozen():
    model = Frozen(150)
    with accelmgr.Manager(model, Count(), nprocs=1, batch_size_per_device=1, runners__threads=1) as manager:
        manager.step()
        place, where = 0, "at the beginning"
        for number in range(1, 150):
            manager.zero_grad()
            model.parts[number].requires_grad_(True)
            where, _ = interrupted_at(place, manager.step)
            steps = manager.statistics().steps
            manager.zero_grad()
            assert manager.step().step == steps + 1
            assert [part.grad[0].item() for part in model.parts[: number + 1]] == [float(steps)] * (number + 1), where
            assert all(part.grad is None for part in model.parts[number + 1 :]), where
            place += 7


def test_a_step_of_a_TPUManager():
    model = Sees()
    with TPUManager(model, Count(), start=True, **OPTIONS) as manager:

        def step():
            try:
                return manager.step()
            except Interrupted as error:
                if getattr(error, "step_result", None) is not None and error.step_result.counted:
                    assert manager.last_result is error.step_result and manager.gradients_accumulated.value == 2
                raise

        check_each_place(manager, model, step, zeroes=False)


def written(manager, model):
    with manager.writing():
        model.weight.data.mul_(1)


CALLS = {
    "sync_buffers": lambda manager, model: manager.sync_buffers(),
    "update_buffers": lambda manager, model: manager.update_buffers(),
    "update_model_parameters": lambda manager, model: manager.update_model_parameters(
        [parameter.detach().clone() for parameter in model.parameters()]
    ),
    "writing": written,
    "state_dict": lambda manager, model: manager.state_dict(),
    "save_checkpoint": lambda manager, model: manager.save_checkpoint(),
    "resize": lambda manager, model: manager.resize(1),
    "refresh": lambda manager, model: manager.refresh(),
    "rebind": lambda manager, model: manager.rebind(),
}
LONG = {"refresh": 331, "rebind": 173, "save_checkpoint": 3}  # A place of so many is interrupted.


@pytest.mark.parametrize("call", CALLS)
def test_after_a_call_that_was_interrupted_all_is_as_before(tmp_path, call):
    model = Sees()
    options = {**OPTIONS, "runners__threads": 1, "checkpoint": {"directory": str(tmp_path / "checkpoints")}}
    with accelmgr.Manager(model, Count(), **options) as manager:
        account = Account(manager, model)
        account.note(manager.step())
        place, saved = random.randrange(LONG.get(call, 1)), []
        where = "at the beginning"
        while where:
            where, result = interrupted_at(place, lambda: CALLS[call](manager, model))
            if call == "save_checkpoint":
                saved += [written.step for written in manager.checkpoints_written(60)]
                assert saved[-1:] == [manager.statistics().steps] or isinstance(result, Interrupted), where
            result = manager.step()
            assert result.counted, (where, result.error)
            account.note(result)
            account.check(where)
            place += LONG.get(call, 1)


in_forks = []
os.register_at_fork(after_in_child=lambda: [call() for call in in_forks])


@pytest.mark.parametrize("call", ["refresh", "rebind"])
def test_a_step_begins_what_ctrl_c_has_ended_while_other_processes_began(call):
    model, host = Sees(), os.getpid()
    with accelmgr.Manager(model, Count(), start_method="fork", runners__threads=1, **OPTIONS) as manager:
        account = Account(manager, model)
        account.note(manager.step())
        in_forks.append(lambda: os.kill(host, signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            CALLS[call](manager, model)
        in_forks.clear()
        result = manager.step()
        assert result.ok, result.error
        account.note(result)
        account.check(call)


def test_what_checkpoints_written_has_not_told_the_next_call_tells(tmp_path):
    options = {**OPTIONS, "runners__threads": 1, "checkpoint": {"directory": str(tmp_path)}}
    with accelmgr.Manager(Sees(), Count(), **options) as manager:
        place, where = 0, "at the beginning"
        while where:
            manager.step()
            manager.save_checkpoint()
            where, told = interrupted_at(place, lambda: manager.checkpoints_written(60))
            told = [] if where else told
            assert [each.step for each in told + manager.checkpoints_written(60)] == [manager.statistics().steps], where
            place += 1


class BoundToItsThread:
    """Elements as those of Count. Reading number `at` is interrupted `times`."""

    def __init__(self, at, times):
        self._at, self._times = at, times
        self._bound = sqlite3.connect(":memory:")

    def __iter__(self):
        for i, element in enumerate(Count()):
            self._bound.execute("select 1")
            for _ in range(self._times if i == self._at else 0):
                signal.raise_signal(signal.SIGINT)
            yield element


def test_ctrl_c_while_the_host_reads_ends_the_step_and_not_the_data():
    model = Sees()
    with accelmgr.Manager(model, BoundToItsThread(9, 1), runners__threads=1, prefetch=1, **OPTIONS) as manager:
        account = Account(manager, model)
        interrupted = 0
        for _ in range(10):
            try:
                account.note(manager.step())
            except KeyboardInterrupt as error:
                account.note(error)
                interrupted += 1
            account.check(interrupted)
        assert interrupted == 1 and manager.statistics().steps >= 9


def test_a_second_one_ends_the_read_and_the_data():
    with accelmgr.Manager(Sees(), BoundToItsThread(9, 2), runners__threads=1, prefetch=1, **OPTIONS) as manager:
        result = None
        with contextlib.suppress(KeyboardInterrupt):
            for _ in range(10):
                result = manager.step()
        assert result.ok
        result = manager.step()
        while result.ok:
            result = manager.step()
        assert "KeyboardInterrupt" in result.error


@pytest.mark.parametrize("dataset", ["read_by_the_manager", "read_by_a_thread_of_the_host", "read_by_the_host"])
def test_at_random_times(tmp_path, dataset):
    seed = os.environ.get("STORM_SEED", str(random.randrange(2**32)))
    seconds = os.environ.get("SIGNAL_STORM_S", "3")
    program = pathlib.Path(__file__).with_name("signal_storm.py")
    code, out, err = run(str(program), dataset, seconds, seed, cwd=tmp_path)
    assert code == 0 and "calls interrupted" in out, f"STORM_SEED={seed}: {out}{err}"
