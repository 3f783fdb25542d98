"""What scripts for plain PyTorch do beside training: it works, or is refused with what to do."""

from __future__ import annotations

import copy
import os
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


# Parameters that forward() moves: more in test_joint_update.py


def test_several_runners_may_not_write_to_the_master():
    with pytest.raises(accelmgr.ConfigError, match="several runners would write at the same time"):
        start(Line(), runners__protect_parameters=False)


# Buffers that the first batch makes larger


class Observer(nn.Module):
    """Its buffers get their shapes from the first batch, as those of an observer of quantization. One is resized in
    place, and one is assigned."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("low", torch.tensor([]))
        self.register_buffer("high", torch.tensor([]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        low, high = x.detach().amin(0), x.detach().amax(0)
        if self.low.numel() == 0:
            self.low.resize_(2).copy_(low)
            self.high = high
        self.low.copy_(torch.minimum(self.low, low))
        self.high = torch.maximum(self.high, high)
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
        for step in range(3):
            plain.zero_grad()
            plain(torch.stack(DATA[2 * step : 2 * step + 2])).backward()
            manager.step(accumulate=False).raise_for_status()
            assert torch.equal(model.layer.weight.grad, plain.layer.weight.grad)
            for each in (model, plain):
                each.observers[0].low.fill_(-5.0)
    torch.testing.assert_close(dict(model.named_buffers()), dict(plain.named_buffers()), rtol=0, atol=0)


# Optimizers


def test_steps_of_optimizers_that_runners_cannot_serve_are_refused():
    """Those that evaluate the loss several times are in test_repeat.py."""
    model = Line()
    with start(model) as manager:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(torch.ones(1))
        manager.step().raise_for_status()
        with pytest.raises(accelmgr.UsageError, match=r"a GradScaler makes this step"):
            scaler.step(optimizer)
        with pytest.raises(accelmgr.UsageError, match="the gradients of a manager are dense"):
            torch.optim.SparseAdam(model.parameters()).step()
        with pytest.raises(accelmgr.UsageError, match="it changes nothing"):
            torch.optim.SGD(Line().parameters(), lr=0.1).step()
        torch.optim.SGD(nn.Linear(3, 3).parameters(), lr=0.1).step()
        before = model.layer.weight.detach().clone()
        torch.amp.GradScaler("cpu", enabled=False).step(optimizer)
        assert not torch.equal(model.layer.weight, before)


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


# A change after the start that runners cannot be told


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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGQUIT, signal.SIGINT])
def test_helpers_leave_signals_to_the_host(number):
    from conftest import descendants  # Helpers import this file, and that one would give them a handler of Ctrl-C.

    with start(Line(), start_method="spawn") as manager:
        assert manager.step().ok
        for pid in (manager.statistics().manager_pid, *descendants(manager.statistics().manager_pid)):
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
