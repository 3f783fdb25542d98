"""What scripts for plain PyTorch do beside training: it works, or is refused with what to do."""

from __future__ import annotations

import copy
import os
import pathlib
import signal
import threading

import pytest
import torch
from programs import run_script
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import accelmgr

DATA = [torch.tensor([float(i), 1.0]) for i in range(64)]


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).square().mean()


def start(model: nn.Module, **options: object) -> accelmgr.Manager:
    return accelmgr.Manager(model, DATA, **{"nprocs": 2, "batch_size_per_device": 2, "runners__threads": 1, **options})


# Parameters that forward() moves


class Moves(Line):
    def __init__(self, puts_back: bool) -> None:
        super().__init__()
        self.puts_back = puts_back

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (slope,) = torch.autograd.grad(super().forward(x), self.layer.weight)
        self.layer.weight.data.add_(slope)
        loss = super().forward(x)
        if self.puts_back:
            self.layer.weight.data.sub_(slope)
        return loss


def test_each_runner_moves_its_own_parameters():
    torch.manual_seed(1)
    model = Moves(True)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    expected = [torch.zeros_like(parameter) for parameter in before]
    for half in (DATA[0:4:2], DATA[1:4:2]):
        model.zero_grad()
        model(torch.stack(half)).backward()
        for total, parameter in zip(expected, model.parameters(), strict=True):
            total += parameter.grad / 2
    model.zero_grad()
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), before, strict=True):
            parameter.copy_(value)
    with start(model) as manager:
        manager.step().raise_for_status()
        for parameter, value, gradient in zip(model.parameters(), before, expected, strict=True):
            assert torch.equal(parameter, value), "the master has not moved"
            torch.testing.assert_close(parameter.grad, gradient)


def test_a_parameter_that_is_not_put_back_is_named_at_once():
    with start(Moves(False)) as manager:
        result = manager.step()
        assert (result.ok, result.error_type) == (False, "ModelError")
        assert "'layer.weight' and did not put it back" in result.error
        assert manager.statistics().replacements == 0


def test_several_runners_may_not_write_to_the_master():
    with pytest.raises(accelmgr.ConfigError, match="several runners would write at the same time"):
        start(Line(), runners__protect_parameters=False)


# Buffers that the first batch makes larger


class Observes(Line):
    """One buffer is resized in place, and one is assigned."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("low", torch.tensor([]))
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values = x.amin(0)
        if self.low.numel() == 0:
            self.low.resize_(2).copy_(values)
            self.scale = values + 1
        self.low.copy_(torch.minimum(self.low, values))
        return super().forward(x)


def test_buffers_get_their_shapes_from_the_first_batch():
    model = Observes()
    with start(model) as manager:
        assert [manager.step().ok for _ in range(3)] == [True] * 3
        assert manager.statistics().samples == 12, "no element was lost"
        assert (model.low.tolist(), model.scale.tolist()) == ([0.0, 1.0], [1.0, 2.0])
        model.low.fill_(-5.0)
        manager.step()
        assert model.low.tolist() == [-5.0, -5.0]


class Observer(nn.Module):
    """Its buffers get their shapes from the first batch, as those of an observer of quantization."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("low", torch.tensor([]))
        self.register_buffer("high", torch.tensor([]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        low, high = x.detach().amin(0), x.detach().amax(0)
        if self.low.numel() == 0:
            self.low, self.high = low, high
        self.low, self.high = torch.minimum(self.low, low), torch.maximum(self.high, high)
        return x + self.high - self.low


class Observed(Line):
    def __init__(self) -> None:
        super().__init__()
        self.observers = nn.Sequential(*(Observer() for _ in range(48)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.observers(x) / 1e14)


@pytest.mark.parametrize("start_method", ["spawn", "forkserver", "fork"])
def test_there_is_room_for_many_of_them(start_method):
    torch.manual_seed(1)
    model = Observed()
    plain = copy.deepcopy(model)
    with start(model, nprocs=1, start_method=start_method) as manager:
        for step in range(2):
            plain.zero_grad()
            plain(torch.stack(DATA[2 * step : 2 * step + 2])).backward()
            manager.step(accumulate=False).raise_for_status()
            assert torch.equal(model.layer.weight.grad, plain.layer.weight.grad)
    for (name, buffer), expected in zip(model.named_buffers(), plain.buffers(), strict=True):
        assert torch.equal(buffer, expected), name


# Optimizers


def test_a_grad_scaler_is_refused():
    model = Line()
    with start(model) as manager:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(torch.ones(1))
        manager.step()
        with pytest.raises(accelmgr.UsageError, match=r"a GradScaler makes this step"):
            scaler.step(optimizer)
        before = model.layer.weight.detach().clone()
        torch.amp.GradScaler("cpu", enabled=False).step(optimizer)
        assert not torch.equal(model.layer.weight, before)


def test_lbfgs_is_refused_when_it_steps():
    model = Line()
    with start(model) as manager:
        optimizer = torch.optim.LBFGS(model.parameters())
        with pytest.raises(accelmgr.UsageError, match="LBFGS evaluates the loss several times"):
            optimizer.step(lambda: manager.step().loss)


def test_sparse_adam_is_refused_when_it_steps():
    model = Line()
    with start(model) as manager:
        optimizer = torch.optim.SparseAdam(model.parameters())
        manager.step().raise_for_status()
        with pytest.raises(accelmgr.UsageError, match="the gradients of a manager are dense"):
            optimizer.step()


def test_an_optimizer_of_a_copy_is_refused():
    with start(Line()) as manager:
        manager.step()
        with pytest.raises(accelmgr.UsageError, match="it changes nothing"):
            torch.optim.SGD(Line().parameters(), lr=0.1).step()
        torch.optim.SGD(nn.Linear(3, 3).parameters(), lr=0.1).step()


# Models that cannot be shared


def wrapped() -> nn.Module:
    model = Line()
    model.layer.weight = nn.Parameter(TwoTensor(torch.ones(1, 2), torch.ones(1, 2)))
    return model


def wrapped_buffer() -> nn.Module:
    model = Line()
    model.register_buffer("more", TwoTensor(torch.ones(1, 2), torch.ones(1, 2)))
    return model


class Synchronized(Line):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.SyncBatchNorm(2)


REFUSED = {
    "subclass": (wrapped, r"'layer.weight' is a TwoTensor and requires a gradient; only plain tensors can be trained"),
    "subclass as a buffer": (wrapped_buffer, r"'more' of the model is a TwoTensor, which has no memory.*dequantize"),
    "DataParallel": (lambda: nn.DataParallel(Line()), "pass model.module"),
    "SyncBatchNorm": (Synchronized, "'norm' of the model is a SyncBatchNorm"),
    "TorchScript": (lambda: nn.Sequential(torch.jit.script(Line())), "'0' of the model is TorchScript.*made of"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_cannot_be_shared_is_refused_with_the_remedy(name):
    make, message = REFUSED[name]
    with pytest.raises(accelmgr.ModelError, match=message):
        start(make())


# Changes after the start that runners cannot be told


def test_what_processes_that_are_no_forks_cannot_be_told_is_named():
    model = Line()
    with start(model, start_method="forkserver") as manager:
        manager.step()
        model.lock = threading.Lock()
        with pytest.raises(accelmgr.ModelError, match=r"changed: attribute 'lock' of 'model'.*'forkserver' cannot"):
            manager.step()
        del model.lock
        assert manager.step().ok


def test_a_buffer_that_is_registered_later_is_named():
    model = Line()
    with start(model) as manager:
        manager.step()
        model.lock = threading.Lock()
        assert manager.step().ok
        model.layer.register_buffer("late", torch.ones(1))
        with pytest.raises(accelmgr.ModelError, match=r"'layer.late' of the model, a buffer, was registered"):
            manager.step()


# Signals to the whole job


def descendants(pid: int) -> list[int]:
    found, new = [], [pid]
    while new:
        new = [
            int(child)
            for parent in new
            for task in pathlib.Path(f"/proc/{parent}/task").glob("*/children")
            for child in task.read_text().split()
        ]
        found += new
    return found


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGQUIT, signal.SIGINT])
def test_helpers_leave_signals_to_the_host(number):
    with start(Line(), start_method="spawn") as manager:
        assert manager.step().ok
        helpers = set(descendants(manager.statistics().manager_pid)) | {manager.statistics().manager_pid}
        for pid in helpers:
            os.kill(pid, number)
        assert manager.step().ok
        assert manager.statistics().losses == 0


# Ranks of spawn()

TOP = """
import torch
import accelmgr.distributed as idist
torch.manual_seed(5)
class Result:
    def __init__(self, weight): self.weight = weight
def train(local_rank):
    return Result(torch.nn.Linear(2, 2).weight.tolist())
if __name__ == "__main__":
    context = idist.spawn("shm", train, (), nproc_per_node=2, join=False)
    context.join()
    one, other = context.results
    print(one.weight == other.weight == torch.nn.Linear(2, 2).weight.tolist(), type(one) is Result)
"""


def test_ranks_run_the_top_of_the_script(tmp_path):
    code, out, err = run_script(TOP, cwd=tmp_path)
    assert (code, out) == (0, "True True\n"), err


WORKERS = """
import collections, sys
import torch, accelmgr
Pair = collections.namedtuple("Pair", "x")
class Rows(torch.utils.data.Dataset):
    def __len__(self): return 8
    def __getitem__(self, index): return Pair(torch.tensor([float(index)]))
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))
    def forward(self, x): return (self.weight * x).mean()
if __name__ == "__main__":
    loader = torch.utils.data.DataLoader(Rows(), batch_size=None, num_workers=2, multiprocessing_context=sys.argv[1])
    with accelmgr.Manager(Net(), loader, nprocs=1, batch_size_per_device=4, runners__threads=1) as manager:
        print([result.loss for result in manager.steps()])
"""


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_workers_of_a_data_loader_find_the_classes_of_the_script(tmp_path, method):
    code, out, err = run_script(WORKERS, method, cwd=tmp_path)
    assert (code, out) == (0, "[1.5, 5.5]\n"), err
