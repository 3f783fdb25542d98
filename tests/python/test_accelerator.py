"""What runners on an accelerator of torch compute, against plain PyTorch, and how they fail. The device is a fake."""

from __future__ import annotations

import itertools
import os
from typing import Any, ClassVar

import device_suite
import pytest
import torch
from device_runners import SHAPE, Does, Dropping, Vectors, assert_close, check_buffers, vectors
from fake_accelerator import Fake, install, start
from oracle import Oracle
from torch import nn

import accelmgr
from accelmgr._runner import replica_accelerator


class Words(nn.Module):
    """An embedding of positions beside two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Embedding(6, 16)
        self.first, self.last = nn.Linear(4, 16), nn.Linear(16, 2)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
        assert x.device.type == self.first.weight.device.type
        places = torch.arange(len(x), device=x.device)
        hidden = torch.tanh(self.first(x) + self.positions(places))
        loss = nn.functional.mse_loss(self.last(hidden), y)
        return {"loss": loss, "twice": 2 * loss, "is_fake": float(loss.device.type == "fake")}


class TestNumbers(device_suite.Numbers):
    start = staticmethod(start)
    model = Words
    recurrent = nn.RNN  # For an LSTM torch asks a private device for kernels that the CPU does not have.

    def check(self, results, micro_batches):
        assert {result.scalars["is_fake"] for result in results} == {1}


def test_the_session_makes_the_update_of_inner_steps():
    torch.manual_seed(1)
    model = Words()
    shape = {"nprocs": 2, "batch_size_per_device": 3}
    oracle = Oracle(model, vectors(4), **shape)
    with start(model, Vectors(), **shape) as manager:
        ours, theirs = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in (model, oracle.model)]
        for result in manager.steps(4, optimizer=ours):
            oracle.zero_grad()
            assert result.loss == pytest.approx(oracle.step(), rel=1e-5)
            assert result.scalars["is_fake"] == 1
            assert_close(manager, oracle)
            for one, other in zip(model.parameters(), oracle.model.parameters(), strict=True):
                other.grad.copy_(one.grad)  # As above: then the updates differ by rounding alone.
            theirs.step()
            for one, other in zip(model.parameters(), oracle.model.parameters(), strict=True):
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        assert manager.call(lambda model: type(model).__name__) == "Words"  # It is no step, and updates nothing.
        assert all(map(torch.equal, model.parameters(), before))
        assert float(ours.state[next(model.parameters())]["step"]) == 4


class TiedByStorage(nn.Module):
    """Two parameters over one memory."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(4, 3, bias=False)
        self.row = nn.Parameter(self.encoder.weight.data[1])

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
        return {"loss": self.encoder(x).pow(2).mean() + self.row.pow(3).sum()}


def test_parameters_over_one_memory_are_not_updated_by_the_session():
    model = TiedByStorage()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with start(model, Vectors(), nprocs=1, batch_size_per_device=3) as manager:
        with pytest.raises(accelmgr.UsageError, match="lies in the memory of another parameter"):
            manager.step(optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
        assert manager.statistics().steps == 0
        assert all(map(torch.equal, model.parameters(), before))


class Scaled(nn.Module):
    """Its temperature is a plain tensor, and its loss is computed outside."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.temperature = torch.full((), 2.0, requires_grad=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.temperature


def summed(outputs: torch.Tensor, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    loss = nn.functional.mse_loss(outputs, batch["y"], reduction="sum")
    return {"loss": loss, "rows": torch.full((), float(len(outputs)), device=loss.device)}


def test_loss_extra_and_a_sum_are_those_of_plain_pytorch():
    torch.manual_seed(1)
    model = Scaled()
    plain = {"weight": model.layer.weight.detach().clone(), "bias": model.layer.bias.detach().clone()}
    leaves = [value.requires_grad_() for value in plain.values()] + [torch.full((), 2.0, requires_grad=True)]
    rows = list(itertools.islice(Vectors(), 6))
    x, y = (torch.stack([row[name] for row in rows]) for name in ("x", "y"))
    loss = nn.functional.mse_loss(nn.functional.linear(x, *leaves[:2]) * leaves[2], y, reduction="sum") / 6
    loss.backward()
    shape = {"nprocs": 2, "batch_size_per_device": 3}
    options = {"loss": summed, "extra": {"temperature": model.temperature}, "loss_scaling": "sum_over(rows)"}
    with start(model, Vectors(), **shape, **options) as manager:
        result = manager.step()
        result.raise_for_status()
        assert result.loss == pytest.approx(loss.item(), rel=1e-5) and result.scalars == {"rows": 6}
        for own, other in zip(manager.parameters(), leaves, strict=True):
            torch.testing.assert_close(own.grad, other.grad, rtol=1e-5, atol=1e-6)


def test_buffers_go_to_the_device_and_come_back():
    check_buffers(start, micro_batches=2, steps=3)


class Late(Dropping):
    """Waits where it is told to, until it may go on."""

    def obey(self) -> None:
        if self.told("wait"):
            while not self.told("go"):
                os.sched_yield()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
        outputs = super().forward(x, y)
        return {"loss": outputs["loss"], "synchronized": float(Fake.current.synchronized)}


def test_what_an_attempt_has_left_on_the_device_is_awaited_before_the_next(tmp_path):
    model = Late(tmp_path)
    with start(model, Vectors(), nprocs=1, **SHAPE) as manager:
        before = [manager.step().scalars["synchronized"] for _ in range(2)]
        assert before[1] - before[0] == 1, "the group of a step's results"
        model.tell("wait")
        assert manager.step(timeout=0.2).status == "timeout"
        model.tell("go")
        result = manager.step()
        assert result.ok and result.scalars["synchronized"] - before[1] == 2


FAILURES = {
    "compute": lambda: RuntimeError("Fake error: the chip is gone"),
    "copy": lambda: getattr(torch, "AcceleratorError", torch.OutOfMemoryError)("the chip is gone"),
    "memory": lambda: torch.OutOfMemoryError("the chip is full"),
    "model": lambda: RuntimeError("the model is at fault"),
}


class Failing(Dropping):
    def obey(self) -> None:
        super().obey()
        for name, error in FAILURES.items():
            if self.told(name):
                Fake.current.failures["copy" if name == "copy" else "compute"] = error()


class TestFaults(device_suite.Faults):
    start = staticmethod(start)
    failing = Failing
    lost: ClassVar = {
        name: ("the device fake:0 has failed: ", str(FAILURES[name]())) for name in ("compute", "copy", "memory")
    }
    wrong: ClassVar = {"model": "the model is at fault"}


def take_generators_away() -> None:
    install()
    for name in ("get_rng_state", "manual_seed"):
        if hasattr(Fake, name):
            delattr(Fake, name)


def test_a_backend_without_generators_trains(tmp_path):
    model = Dropping(tmp_path)
    model.taken = Does(take_generators_away)
    with start(model, Vectors(), **SHAPE) as manager:
        assert manager.step().ok
        model.tell("die")
        assert manager.step().tries == 2


def take_accelerator_away() -> None:
    """Makes torch one that was built for none."""
    torch.accelerator.current_accelerator = lambda: None


def test_a_torch_without_an_accelerator_is_named_with_what_would_have_one():
    model = Words()
    model.taken = Does(take_accelerator_away)
    with pytest.raises(accelmgr.ConfigError, match=r"is accelerator, but torch 2\.\S+ of \S+ knows no accel") as caught:
        accelmgr.Manager(model, Vectors(), nprocs=1, device="accelerator")
    assert caught.value.key == "runners.device"
    assert "install torch 2.6 or newer that was built for the device" in str(caught.value)


def test_an_older_torch_is_named(monkeypatch):
    monkeypatch.delattr(torch, "accelerator")
    monkeypatch.setattr(torch, "__version__", "2.5.1")
    with pytest.raises(accelmgr.ConfigError, match=r"torch 2\.5\.1 of \S+ has no torch.accelerator; install torch 2.6"):
        replica_accelerator.check_build()


def test_runners_need_a_device_each_unless_they_may_share():
    message = "device_count.. of kind fake is 1, which leaves none for runner 1; set nprocs to 1, or .*oversubscribe"
    with pytest.raises(accelmgr.RunnerError, match=message):
        start(Words(), Vectors(), nprocs=2, runners__oversubscribe=False)


def test_each_rank_has_the_device_of_its_number(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cpu"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    selected = []
    monkeypatch.setattr(torch.accelerator, "set_device_index", selected.append)
    devices = [replica_accelerator.open_device(rank, oversubscribe=True).index for rank in range(3)]
    assert devices == selected == [0, 1, 0]


def test_devices_of_this_kind_are_not_listed_and_a_built_in_model_has_none():
    with pytest.raises(accelmgr.ConfigError, match="runners.devices names GPUs, but runners.device is accelerator"):
        accelmgr.Manager(Words(), Vectors(), nprocs=1, device="accelerator", runners={"devices": ["0"]})
    with pytest.raises(accelmgr.ConfigError, match="runners.device is accelerator.*'mlp'.*is for models of Python"):
        accelmgr.Manager("mlp", "synthetic", nprocs=1, device="accelerator")
