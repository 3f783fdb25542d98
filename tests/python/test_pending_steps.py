"""Steps that a thread makes while the host does something else: the bits of steps(), in each way to wait for them."""

from __future__ import annotations

import asyncio
import functools
import os
import select
import signal
import sqlite3
import threading

import pytest
import torch
from conftest import descendants
from gate import Gate
from interruptions import interrupted_at
from launching import kill
from programs import run
from test_inner import ELEMENTS, OPTIMIZERS, Net, assert_same, in_host, manager_of

import accelmgr
from accelmgr._process import torch_settings

pytestmark = pytest.mark.usefixtures("one_thread")


class Gated(Net):
    """Blocks in forward() while the gate is shut, and raises for elements of class 9."""

    def __init__(self, folder) -> None:
        super().__init__()
        self.gate = Gate(folder / "gate")

    def forward(self, inputs, targets) -> torch.Tensor:
        self.gate.pass_through()
        if (targets == 9).any():
            raise ArithmeticError("there are no nines")
        return super().forward(inputs, targets)


adamw = OPTIMIZERS["adamw"]


def numbers(results) -> list[int]:
    return [result.step for result in results]


@pytest.mark.parametrize("runners", [1, 3])
def test_the_same_bits_as_with_the_optimizer_in_the_host(runners):
    model = Net()
    optimizer = adamw(model.parameters())
    with manager_of(model, runners) as manager:
        pending = manager.begin_steps(13, optimizer=optimizer, clip_grad_norm=0.5, sync_every=5)
        assert numbers(pending.result()) == list(range(1, 14)) == numbers(pending.results())
        assert pending.done() and manager.synced_step == 13
        assert_same((model, optimizer), in_host(adamw, 13, runners, clip=0.5, rates=0))
        assert numbers(manager.begin_steps(2, optimizer=optimizer).result()) == [14, 15]
        assert numbers(manager.steps(2, optimizer=optimizer)) == [16, 17]
        manager.step().raise_for_status()
        optimizer.step()
        assert numbers(manager.begin_steps(2, optimizer=optimizer).result(timeout=60)) == [19, 20]


def test_the_end_of_the_data_ends_the_steps():
    model = Net()
    optimizer = adamw(model.parameters())
    with manager_of(model) as manager:
        assert numbers(manager.begin_steps(1000, optimizer=optimizer).result()) == list(range(1, 101))
        assert manager.synced_step == 100
    assert_same((model, optimizer), in_host(adamw, 100, rates=0))


def is_readable(pending) -> bool:
    return pending in select.select([pending], [], [], 0)[0]


def test_it_can_be_waited_for_as_for_a_file(tmp_path):
    model = Gated(tmp_path)
    with manager_of(model) as manager:
        model.gate.shut()
        pending = manager.begin_steps(3, optimizer=adamw(model.parameters()))
        with model.gate.held():
            assert not pending.done() and not is_readable(pending) and pending.results() == []
            with pytest.raises(TimeoutError, match="after 0.01 s the steps are not over; 0 are made"):
                pending.result(timeout=0.01)
        assert select.select([pending], [], [])[0] == [pending]
        assert pending.done() and is_readable(pending) and numbers(pending.results()) == [1, 2, 3]
    assert is_readable(pending)


def test_in_asyncio(tmp_path):
    model = Gated(tmp_path)

    async def main(manager, optimizer):
        loop, over = asyncio.get_running_loop(), asyncio.Event()
        model.gate.shut()
        pending = manager.begin_steps(3, optimizer=optimizer)
        with model.gate.held():
            loop.add_reader(pending, over.set)
            waits = [asyncio.ensure_future(pending) for _ in range(2)]
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(pending, 0.01)
            assert not over.is_set() and not any(each.done() for each in waits)
        for each in waits:
            assert numbers(await each) == [1, 2, 3]
        await over.wait()
        loop.remove_reader(pending)
        assert numbers(await pending) == [1, 2, 3]
        failed = manager.begin_steps(1, optimizer=optimizer, sync_every=0)
        with pytest.raises(accelmgr.UsageError, match="sync_every is 0"):
            await failed

    with manager_of(model) as manager:
        asyncio.run(main(manager, adamw(model.parameters())))


def test_cancel_ends_it_between_two_steps(tmp_path):
    model = Gated(tmp_path)
    optimizer = adamw(model.parameters())
    with manager_of(model) as manager:
        manager.step(optimizer=optimizer).raise_for_status()
        model.gate.shut()
        pending = manager.begin_steps(50, optimizer=optimizer)
        with model.gate.held():
            where, _ = interrupted_at(1, pending.cancel)  # When it is about to wait.
            assert where.startswith("pending.py")
            with pytest.raises(accelmgr.UsageError, match="while steps of begin_steps"):
                manager.sync()
        assert numbers(pending.result()) == [2]
        pending.cancel()
        assert manager.synced_step == 0
        assert manager.step(optimizer=optimizer).step == 3
    assert_same((model, optimizer), in_host(adamw, 3, rates=0))


WITHOUT_ARGUMENTS = (
    "sync start rebind refresh recover zero_grad save_checkpoint checkpoints_written state_dict buffers sync_buffers "
    "update_buffers writing get_aggregated_gradients gradients32 revert_parameters"
).split()
CALLS = {name: lambda manager, optimizer, name=name: getattr(manager, name)() for name in WITHOUT_ARGUMENTS} | {
    "step": lambda manager, optimizer: manager.step(optimizer=optimizer),
    "steps": lambda manager, optimizer: next(manager.steps(1)),
    "begin_steps": lambda manager, optimizer: manager.begin_steps(1, optimizer=optimizer),
    "call": lambda manager, optimizer: manager.call(len),
    "resize": lambda manager, optimizer: manager.resize(1),
    "restore": lambda manager, optimizer: manager.restore(optimizer),
    "update_model_parameters": lambda manager, optimizer: manager.update_model_parameters([]),
    "check_optimizer": lambda manager, optimizer: manager.check_optimizer(optimizer),
}


def test_meanwhile_other_calls_are_refused_and_signal_handlers_that_raise_leave_the_steps_going(tmp_path):
    model = Gated(tmp_path)
    optimizer = adamw(model.parameters())
    with manager_of(model) as manager:
        model.gate.shut()
        pending = manager.begin_steps(3, optimizer=optimizer)
        with model.gate.held():
            for name, call in CALLS.items():
                words = rf"^{'step' if name == 'steps' else name}\(\) was called while .* call result\(\) or cancel\(\)"
                with pytest.raises(accelmgr.UsageError, match=words):
                    call(manager, optimizer)
            assert len(manager.parameters()) == len(manager.named_parameters())
            assert manager.statistics().steps == manager.synced_step == 0
            if (child := os.fork()) == 0:
                code = 1
                try:
                    for call in (pending.result, pending.cancel, manager.stop, manager.sync):
                        with pytest.raises(accelmgr.UsageError, match="in a forked child"):
                            call()
                    code = 0
                finally:
                    os._exit(code)
            assert os.waitpid(child, 0)[1] == 0
            with pytest.raises(KeyboardInterrupt):
                main = threading.main_thread().ident
                threading.Timer(0.05, signal.pthread_kill, (main, signal.SIGINT)).start()
                pending.result()
            place = 0
            with pytest.raises(TimeoutError):
                while interrupted_at(place, lambda: pending.result(0))[0]:
                    place += 1
            assert place > 3
        assert numbers(pending.result()) == [1, 2, 3]
        manager.sync()
    assert_same((model, optimizer), in_host(adamw, 3, rates=0))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # In finalizers.
def test_steps_whose_beginning_is_interrupted_do_not_go_on(monkeypatch):
    # Python 3.11 may crash when a trace function raises where current() enters its `with` block.
    monkeypatch.setattr(torch_settings, "current", functools.partial(dict, torch_settings.current()))
    model = Net()
    optimizer = adamw(model.parameters())
    with manager_of(model) as manager:
        manager.step(optimizer=optimizer).raise_for_status()
        place, where = 0, "at the beginning"
        while where:
            where, pending = interrupted_at(place, lambda: manager.begin_steps(1, optimizer=optimizer))
            if isinstance(pending, accelmgr.PendingSteps):  # Also if a finalizer was interrupted, which raises nothing.
                pending.result()
            manager.sync()
            place += 3
        assert place > 15
        steps = manager.statistics().steps
    assert_same((model, optimizer), in_host(adamw, steps, rates=0))


def test_what_the_model_raises_is_raised_by_result(tmp_path):
    model = Gated(tmp_path)
    data = [*ELEMENTS[:16], (ELEMENTS[0][0], torch.tensor(9)), *ELEMENTS[:20]]
    options = {"nprocs": 1, "batch_size_per_device": 4, "start_method": "fork", "runners__on_loss": "fail"}
    with accelmgr.Manager(model, data, **options) as manager:
        pending = manager.begin_steps(8, optimizer=adamw(model.parameters()), sync_every=2)
        for _ in range(2):
            with pytest.raises(accelmgr.ModelError, match="there are no nines"):
                pending.result()
        with pytest.raises(accelmgr.ModelError, match="there are no nines"):
            asyncio.run(asyncio.wait_for(pending, 60))
        assert pending.done() and numbers(pending.results()) == [1, 2, 3, 4]
        assert manager.synced_step == 4
        manager.stop()


@pytest.mark.parametrize("who", ["run1", "fork"])
def test_a_process_that_is_killed_meanwhile_costs_no_step(tmp_path, who):
    """The thread starts others, and makes the steps since the last sync again."""
    model = Gated(tmp_path)
    optimizer = adamw(model.parameters())
    with manager_of(model, 2) as manager:
        for _ in range(3):
            manager.step(optimizer=optimizer).raise_for_status()
        model.gate.shut()
        pending = manager.begin_steps(6, optimizer=optimizer, sync_every=2)
        with model.gate.held():
            (pid,) = [pid for pid, name in descendants().items() if name == f"accelmgr:{who}"]
            kill(pid)
        assert numbers(pending.result()) == [4, 5, 6, 7, 8, 9]
        assert manager.step(optimizer=optimizer).step == 10
    assert_same((model, optimizer), in_host(adamw, 10, 2, rates=0))


def test_processes_that_the_thread_forks_know_what_the_host_has_changed():
    model = Net()
    optimizer = adamw(model.parameters())
    with manager_of(model, 2, refresh="always") as manager:
        pending = manager.begin_steps(4, optimizer=optimizer)
        assert numbers(pending.result()) == [1, 2, 3, 4]
        assert manager.statistics().runners[0].pid in descendants()
    assert_same((model, optimizer), in_host(adamw, 4, 2, rates=0))


def test_settings_of_torch_are_those_of_the_thread_that_begins():
    models = [Net(), Net()]
    optimizers = [adamw(model.parameters()) for model in models]
    with manager_of(models[0]) as manager, manager_of(models[1]) as other, torch.autocast("cpu", torch.bfloat16):
        pending = manager.begin_steps(5, optimizer=optimizers[0])
        losses = [result.loss for result in other.steps(5, optimizer=optimizers[1])]
        assert [result.loss for result in pending.result()] == losses
    assert_same(*zip(models, optimizers, strict=True))
    with manager_of(Net()) as manager:
        assert [manager.step().loss] != losses[:1]  # Without autocast.


def test_a_dataset_that_this_process_reads():
    model = Net()
    optimizer = adamw(model.parameters())
    options = {"nprocs": 1, "batch_size_per_device": 4, "start_method": "fork", "runners__threads": 1}
    with accelmgr.Manager(model, (element for element in ELEMENTS), **options) as manager:
        assert len(manager.begin_steps(6, optimizer=optimizer).result()) == 6
    assert_same((model, optimizer), in_host(adamw, 6, rates=0))

    def rows(connection):
        for (number,) in connection.execute("select value from numbers"):
            yield ELEMENTS[number]

    with sqlite3.connect(":memory:") as connection:
        connection.execute("create table numbers (value)")
        connection.executemany("insert into numbers values (?)", [(number,) for number in range(40)])
        model = Net()
        with accelmgr.Manager(model, rows(connection), **options) as manager:
            with pytest.raises(accelmgr.UsageError, match="only one thread can read the dataset"):
                manager.begin_steps(6, optimizer=adamw(model.parameters()))
            assert manager.step().ok
    connection.close()


def test_optimizers_that_runners_cannot_have_are_refused_at_once():
    model = Net()
    manager = manager_of(model, start=False)
    with pytest.raises(accelmgr.UsageError, match="call start"):
        manager.begin_steps(1, optimizer=adamw(model.parameters()))
    with manager, pytest.raises(accelmgr.UsageError, match="LBFGS evaluates the loss several times"):
        manager.begin_steps(1, optimizer=torch.optim.LBFGS(model.parameters()))
    with pytest.raises(accelmgr.UsageError, match=r"begin_steps\(\) was called after stop"):
        manager.begin_steps(1, optimizer=adamw(model.parameters()))


@pytest.mark.parametrize("how", ["stop", "block"])
def test_stop_and_the_end_of_a_block_cancel_it(how):
    model = Net()
    optimizer = adamw(model.parameters())
    with manager_of(model) as manager:
        pending = manager.begin_steps(10**6, optimizer=optimizer)
        if how == "stop":
            manager.stop()
            assert pending.done()
    assert pending.done()
    assert len(pending.results()) == manager.statistics().steps
    if how == "block":
        assert manager.synced_step == manager.statistics().steps
        assert_same((model, optimizer), in_host(adamw, manager.synced_step, rates=0))


ENDS = """
import torch
from test_inner import ELEMENTS, Net
import accelmgr
model = Net()
manager = accelmgr.Manager(model, ELEMENTS, nprocs=2, batch_size_per_device=4, start_method="fork", data={"epochs": 0})
pending = manager.begin_steps(10**9, optimizer=torch.optim.SGD(model.parameters(), 0.1))
print("begun")
"""


def test_a_program_may_end_meanwhile(tmp_path):
    code, out, err = run("-c", ENDS, cwd=tmp_path)
    assert (code, out) == (0, "begun\n"), err
