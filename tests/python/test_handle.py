"""Tests of one handle: second threads, forked children, writes by other code, and what a manager refuses."""

import asyncio
import copy
import multiprocessing
import os
import sys
import threading

import pytest
import torch
from gate import Count, Told
from programs import run
from torch import nn

import accelmgr


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    model = Told(tmp_path_factory.mktemp("told"))
    with accelmgr.Manager(model, Count(), nprocs=2, runners__threads=1) as manager:
        yield manager


def test_a_second_thread_is_refused_and_the_first_goes_on(shared):
    model = shared.model
    model.gate.shut()
    results = []
    stepping = threading.Thread(target=lambda: results.append(shared.step()))
    stepping.start()
    with model.gate.held():
        own = list(model.parameters())
        calls = [shared.step, shared.zero_grad, shared.buffers, lambda: shared.writing().__enter__()]
        for call in (*calls, lambda: shared.update_model_parameters(own), shared.stop):
            with pytest.raises(accelmgr.UsageError, match="another thread uses this manager"):
                call()
        with pytest.raises(accelmgr.UsageError, match="belongs to another manager"):  # stop() above failed.
            accelmgr.Manager(model, Count(), nprocs=1, start=False)
        counted = sum(1 for _ in range(1000))  # The thread in step() has released the GIL.
    stepping.join()
    assert counted == 1000 and results[0].ok


def test_a_host_that_awaits_makes_its_steps_in_threads(shared):
    model = shared.model

    async def main():
        counted, is_over = 0, False

        async def count():
            nonlocal counted
            while not is_over:
                counted += 1
                await asyncio.sleep(0)  # Waits for no time, here and below: it gives the other tasks their turn.

        counting = asyncio.create_task(count())
        first = shared.statistics().steps
        for number in range(1, 4):
            before = counted
            result = await asyncio.to_thread(shared.step, accumulate=False)
            assert result.step == first + number and result.ok
            assert counted > before, "the loop went on"

        model.gate.shut()
        stepping = asyncio.create_task(asyncio.to_thread(shared.step))
        await asyncio.sleep(0)  # The task runs, and has handed the step to a thread.
        with model.gate.held():
            before = counted
            stepping.cancel()
            with pytest.raises(asyncio.CancelledError):
                await stepping
            with pytest.raises(accelmgr.UsageError, match="another thread uses this manager"):
                await asyncio.to_thread(shared.step)
            assert counted > before
        while shared.statistics().steps == first + 3:  # The thread ends the step, whose result nobody has.
            await asyncio.sleep(0)
        is_over = True
        await counting
        while True:
            try:
                return first, await asyncio.to_thread(shared.step)
            except accelmgr.UsageError:  # That thread is about to return.
                await asyncio.sleep(0)

    first, result = asyncio.run(asyncio.wait_for(main(), 60))
    assert result.ok and result.step == first + 5


class Ones(torch.utils.data.IterableDataset):
    def __iter__(self):
        while True:
            yield torch.ones(1)


def mean_of(outputs, batch):
    return outputs.mean()


def test_whoever_of_two_threads_makes_a_step_gets_its_result(request):
    before = sys.getswitchinterval()
    request.addfinalizer(lambda: sys.setswitchinterval(before))
    sys.setswitchinterval(1e-6)
    made, refused = [], []

    def step(manager):
        while len(made) < 1500:
            try:
                made.append(manager.step(accumulate=False))
            except accelmgr.UsageError as error:
                refused.append(str(error).split("(")[0])

    with accelmgr.Manager(nn.Linear(1, 1), Ones(), loss=mean_of, nprocs=1, runners__threads=1) as manager:
        threads = [threading.Thread(target=step, args=(manager,)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        steps = manager.statistics().steps
    assert set(refused) == {"step"}
    assert steps == len(made) == sum(result.counted for result in made)


ENDS = """\
import os, pathlib, sys, threading, accelmgr
from gate import Count, Told

folder = pathlib.Path(sys.argv[1])
model = Told(folder)
manager = accelmgr.TPUManager(model, Count(), nprocs=1, start=True)
model.gate.shut()
if sys.argv[2] == "step":
    threading.Thread(target=manager.step, daemon=True).start()
else:
    manager.step_triggered.set()
os.open(folder / "gate", os.O_WRONLY)  # The runner stands there.
sys.exit(7)
"""


@pytest.mark.parametrize("what", ["step", "trigger"])
def test_a_program_ends_whose_daemon_thread_is_inside_a_step(tmp_path, what):
    assert run("-c", ENDS, str(tmp_path), what, cwd=tmp_path) == (7, "", "")


def test_in_a_forked_child_the_handle_is_dead_and_the_parent_unharmed(shared):
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        said = [repr(shared)]
        for call in (shared.step, shared.zero_grad, shared.statistics, shared.stop, shared.get_aggregated_gradients):
            try:
                call()
                said.append("nothing")
            except accelmgr.UsageError as error:
                said.append(str(error))
        os.write(write, "\n".join(said).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as file:
        said = file.read().splitlines()
    os.waitpid(child, 0)
    assert said.pop(0) == "<accelmgr.Manager of another process>"
    assert len(said) == 5 and all(f"the manager belongs to process {os.getpid()}" in line for line in said), said
    assert shared.step().ok


def test_writes_in_place_are_bracketed(shared):
    model = shared.model
    with shared.writing():
        with torch.no_grad():
            model.weight.fill_(3.0)
        with pytest.raises(accelmgr.UsageError, match="while parameters are being written"):
            shared.step()
        with pytest.raises(accelmgr.UsageError, match="does not nest"), shared.writing():
            pass
    assert shared.step().ok


def by_operators(model):
    for parameter in model.parameters():
        parameter.data = parameter.data - 0.5


def by_a_vector(model):
    vector = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(vector - 0.5, model.parameters())


def by_another_dtype(model):
    model.bfloat16().float()


@pytest.mark.parametrize("assign", [by_operators, by_a_vector, by_another_dtype])
@pytest.mark.parametrize("inner", [False, True])
def test_values_that_are_assigned_to_data_are_those_of_the_next_step(assign, inner):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    plain = copy.deepcopy(model)
    rows = torch.randn(16, 3).unbind()
    settings = {"nprocs": 2, "batch_size_per_device": 1, "loss": lambda outputs, batch: outputs.square().mean()}
    with accelmgr.Manager(model, rows, **settings) as manager:
        places = [parameter.data_ptr() for parameter in model.parameters()]
        optimizers = [torch.optim.SGD(each.parameters(), 0.1, momentum=0.9) for each in (model, plain)]
        for step in range(6):
            if step % 2:
                if inner:
                    manager.sync()
                assign(model)
                assign(plain)
            loss = plain(torch.stack(rows[2 * step : 2 * step + 2])).square().mean()
            loss.backward()
            result = manager.step(optimizer=optimizers[0]) if inner else manager.step()
            assert result.loss == pytest.approx(loss.item(), rel=1e-6)
            assert [parameter.data_ptr() for parameter in model.parameters()] == places
            for optimizer in optimizers[inner:]:
                optimizer.step()
            model.zero_grad()
            plain.zero_grad()
    torch.testing.assert_close(model.state_dict(), plain.state_dict())


def test_parameters_whose_memory_was_replaced_are_named(shared):
    weight = shared.model.weight
    own = weight.data
    weight.data = own.clone()
    try:
        with pytest.raises(accelmgr.ModelError, match=r"memory of parameter 'weight' was replaced .*share_memory\(\)"):
            shared.step()
    finally:
        weight.data = own
    weight.grad = torch.ones(2, *weight.shape)[1]
    try:
        with pytest.raises(accelmgr.ModelError, match="gradient of parameter 'weight' is part of other memory"):
            shared.step()
    finally:
        weight.grad = None
    assert shared.step().ok


def test_memory_that_was_moved_in_place_is_named(tmp_path):
    """share_memory_() moves the storage itself, and with it every tensor over it, the manager's own too."""
    model = Told(tmp_path)
    with accelmgr.Manager(model, Count(), nprocs=1) as manager:
        model.weight.share_memory_()
        for call in (manager.step, lambda: manager.check_optimizer(torch.optim.SGD(model.parameters()))):
            with pytest.raises(
                accelmgr.ModelError, match=r"memory of parameter 'weight' was replaced .*share_memory\(\)"
            ):
                call()
    model = Told(tmp_path)
    with accelmgr.Manager(model, Count(), nprocs=1) as manager:
        assert manager.step().ok
        model.weight.grad.share_memory_()
        with pytest.raises(accelmgr.ModelError, match="memory of the gradient of parameter 'weight' was replaced"):
            manager.step()


@pytest.mark.parametrize("what", ["parameter", "view", "gradient", "named"])
def test_tensors_that_go_to_other_processes_stay_in_the_session(shared, what):
    """hivemind sends its state to peers in the same way: through a pipe, by multiprocessing's pickle."""
    weight = shared.model.weight
    sent = {
        "parameter": weight,
        "view": weight.detach()[1:],
        "gradient": weight.grad,
        "named": shared.named_parameters()[0][1],
    }[what]
    values = sent.tolist()
    ours, theirs = multiprocessing.Pipe()
    with ours, theirs:
        theirs.send(sent)
        received = ours.recv()
    assert type(received) is type(sent) and received.requires_grad == sent.requires_grad
    with torch.no_grad():
        weight.fill_(5.0)
        weight.grad.fill_(6.0)
    assert received.tolist() == values, "a copy"
    result = shared.step(accumulate=False)
    assert result.loss == pytest.approx(5.0 * weight.grad.sum().item()), "runners have what the host wrote"


class Same(nn.Module):
    """Returns the spread of its parameters. It is 0 unless the host writes them while a runner reads them."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ParameterList([nn.Parameter(torch.zeros(50_000)) for _ in range(4)])

    def forward(self, x):
        every = torch.cat(list(self.parts))
        return {"loss": every.mean() * x.mean(), "apart": every.max() - every.min(), "value": every[0].detach()}


def test_a_background_thread_cannot_tear_what_runners_read():
    model = Same()
    manager = accelmgr.TPUManager(model, Count(), nprocs=2, batch_size_per_device=1, start=True)
    ended, updated = threading.Event(), threading.Event()
    updates = []

    def optimize():
        while not ended.is_set():
            updates.append(len(updates) + 1.0)
            manager.update_model_parameters([torch.full((50_000,), updates[-1])] * 4)
            updated.set()

    def step():
        # At least one update between steps: a thread that only waits for the manager's lock may never get it.
        assert updated.wait(60)
        updated.clear()
        return manager.step()

    background = threading.Thread(target=optimize)
    try:
        background.start()
        results = [step() for _ in range(25)]
    finally:
        ended.set()
        background.join()
        manager.stop()
    assert [result.status for result in results] == ["ok"] * 25
    assert [result.scalars["apart"] for result in results] == [0.0] * 25
    values = [result.scalars["value"] for result in results]
    assert values == sorted(values), "both runners had the same, and never an older one"
    assert len(set(values)) > 1 and all(value == int(value) for value in values)
