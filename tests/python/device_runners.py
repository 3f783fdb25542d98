"""What tests of runners on devices share: a manager on them (XLA unless said otherwise), data, models, tolerances."""

from __future__ import annotations

import os
import pathlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from oracle import Oracle
from torch import nn

import accelmgr

TOLERANCE = 1e-5  # Of a gradient's norm.
BF16_TOLERANCE = 2**-8 * 4  # A product of numbers that have 8 bits, over the few layers of these models.
SHAPE = {"batch_size_per_device": 3, "grad_accumulation_steps": 2}

# LLVM's optimization takes half of the time in which a runner compiles, and these models gain nothing by it.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")


def vectors(size: int, seed: int = 0) -> Iterator[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(size, generator=generator)
        yield {"x": x, "y": torch.stack([x.sum(), x.prod()])}


class Vectors:
    def __init__(self, size: int = 4) -> None:
        self._size = size

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return vectors(self._size)


def start(model: Any, dataset: Any, **options: Any) -> accelmgr.Manager:
    fixed = {"nprocs": 2, "device": "xla", "runners__threads": 1, "seed_base": 7, "runners__restart_backoff": 0.01}
    fixed["start_method"] = "forkserver"  # The libraries of fakes are found by variables that a new process reads.
    return accelmgr.Manager(model, dataset, **{**fixed, **options})


def distance(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """Of all gradients together, in norms of the expected ones."""
    assert len(found) == len(expected)
    one = torch.cat([gradient.detach().double().flatten() for gradient in found])
    other = torch.cat([gradient.detach().double().flatten() for gradient in expected])
    assert other.norm() > 0
    return ((one - other).norm() / other.norm()).item()


def assert_close(manager: accelmgr.Manager, oracle: Oracle, tolerance: float = TOLERANCE) -> None:
    found = distance(manager.get_aggregated_gradients(), oracle.gradients())
    assert found <= tolerance, f"{found:.3g} of the norm"


class Counted(nn.Module):
    """Tells, beside the loss, what torch_xla has counted in its process before this forward pass."""

    def counts(self) -> dict[str, float]:
        if "torch_xla" not in sys.modules:
            return {}  # It computes on the CPU.
        from torch_xla.debug import metrics

        return {
            "compiled": float(metrics.counter_value("UncachedCompile") or 0),
            "programs": float(metrics.counter_value("MarkStep") or 0),
            "tensors_read": float((metrics.metric_data("TransferFromDeviceTime") or (0,))[0]),
        }


def same(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(one, other, strict=True)
    )


def wait_until_settled(manager: accelmgr.Manager) -> None:
    """step() returns when a step is over, which runners may see a moment later."""
    deadline = time.monotonic() + 60
    while any(runner.phase != "waiting" for runner in manager.statistics().runners):
        assert time.monotonic() < deadline
        os.sched_yield()


class Encoder(Counted):
    """A stock encoder between two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.first, self.last = nn.Linear(1, 16), nn.Linear(16, 2)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
        hidden = self.encoder(self.first(x.unsqueeze(-1)))
        loss = nn.functional.mse_loss(self.last(hidden.mean(1)), y)
        return {"loss": loss, "twice": 2 * loss} | self.counts()


class Tuned(nn.Module):
    """A frozen base of bfloat16 and int8 below what is trained, which is bfloat16 and float32."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(12)
        self.base = nn.Linear(4, 8, dtype=torch.bfloat16).requires_grad_(False)
        self.codes = nn.Parameter(torch.arange(8, dtype=torch.int8), requires_grad=False)
        self.scale = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
        self.head = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.base(x.bfloat16())) * self.scale
        return nn.functional.mse_loss(self.head(hidden.float() + self.codes.float() / 8), y)


def check_frozen_parameters(started: Callable[..., accelmgr.Manager], **options: Any) -> None:
    """Frozen parameters that the host writes reach the device, and get gradients from when they are unfrozen on."""
    model = Tuned()
    plain = Oracle(model, vectors(4), nprocs=2)
    with started(model, Vectors(), **options) as manager:
        for step in range(5):
            for each in (model, plain.model):
                with torch.no_grad():
                    if step in (1, 3):
                        each.base.weight.mul_(-0.5)
                        each.codes.add_(3)
                    each.scale.mul_(1.5)
                each.base.weight.requires_grad_(step >= 2)
            plain.zero_grad()
            result = manager.step(accumulate=False)
            result.raise_for_status()
            assert result.loss == pytest.approx(plain.step(), rel=1e-2), step
            for (name, own), other in zip(model.named_parameters(), plain.model.parameters(), strict=True):
                if own.requires_grad:
                    assert (own.grad - other.grad).norm() <= 3e-2 * other.grad.norm(), f"{name}, step {step}"


class Switched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.LayerNorm(8), nn.Linear(8, 2))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.layers(x), y)


class Writes(Switched):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = super().forward(x, y)
        with torch.no_grad():
            self.layers[3].bias.mul_(0.5)
        return loss


class Ties(nn.Module):
    """One weight under two names, in a list and in a closure; an LSTM, which holds weak references to its weights; a
    parameter that lies within another; frozen and unused ones; hooks."""

    def __init__(self, recurrent: type[nn.RNNBase] = nn.LSTM) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 4, bias=False)
        self.head = nn.Linear(4, 4, bias=False)
        self.head.weight = self.embed.weight
        self.all = [self.embed.weight]
        self.recurrent = recurrent(4, 4, batch_first=True)
        self.whole = nn.Parameter(torch.randn(6))
        self.part = nn.Parameter(self.whole.data[2:6])
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.never = nn.Parameter(torch.ones(2))
        weight = self.embed.weight
        self.norm = lambda: weight.square().mean()
        self.part.register_hook(lambda gradient: 2 * gradient)
        self.register_forward_pre_hook(lambda module, args: args)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.recurrent(self.frozen(self.embed(x)).unsqueeze(1))
        hidden = self.head(hidden.squeeze(1)) * self.part + self.whole.sum() + self.all[0].sum()
        return hidden.square().mean() + self.norm()


def check_ties(started: Callable[..., accelmgr.Manager], recurrent: type[nn.RNNBase] = nn.LSTM) -> None:
    """Ties, views, weak references and hooks are those of the host's model."""
    torch.manual_seed(2)
    model = Ties(recurrent)
    oracle = Oracle(model, vectors(4), nprocs=2, batch_size_per_device=2)
    oracle.model = Ties(recurrent)  # A copy would have the closure of the original.
    oracle.model.load_state_dict(model.state_dict())
    for parameter in oracle.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with started(model, Vectors(), batch_size_per_device=2) as manager:
        assert "head.weight" not in dict(manager.named_parameters())
        for _ in range(3):
            assert manager.step(accumulate=False).loss == pytest.approx(oracle.step(), rel=1e-5)
            assert_close(manager, oracle)
            oracle.zero_grad()
            with torch.no_grad():
                for one, other in zip(model.parameters(), oracle.model.parameters(), strict=True):
                    one.mul_(0.9)
                    other.copy_(one)


class Permuted(nn.Module):
    """Parameters that are not row-major, and an expanded one. Strides in a runner are numbers of the output."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, (1, 2)).to(memory_format=torch.channels_last)
        self.weight = nn.Parameter(torch.randn(2, 3).t())
        self.shift = nn.Parameter(torch.tensor([0.5]).expand(40, 3), requires_grad=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
        hidden = self.conv(x.view(-1, 2, 1, 2)).flatten(1)
        loss = nn.functional.mse_loss(torch.tanh(hidden + self.shift[-1]) @ self.weight, y)
        strides = (stride for tensor in (self.conv.weight, self.weight) for stride in tensor.stride())
        return {"loss": loss, **{f"stride{index}": float(stride) for index, stride in enumerate(strides)}}


def check_strides(started: Callable[..., accelmgr.Manager], knows_strides: bool = True) -> None:
    """Gradients of parameters that are not row-major, also of several micro-batches."""
    torch.manual_seed(4)
    model = Permuted()
    strides = [parameter.stride() for parameter in model.parameters()]
    oracle = Oracle(model, vectors(4), nprocs=2, **SHAPE)
    with started(model, Vectors(), **SHAPE) as manager:
        for _ in range(3):
            result = manager.step(accumulate=False)
            assert result.loss == pytest.approx(oracle.step(), rel=1e-5)
            assert_close(manager, oracle)
            oracle.zero_grad()
            if knows_strides:
                assert list(result.scalars.values()) == [4, 1, 4, 2, 1, 3]
            with torch.no_grad():
                assert [parameter.stride() for parameter in model.parameters()] == strides
                for one, other in zip(model.parameters(), oracle.model.parameters(), strict=True):
                    if one.requires_grad:
                        assert one.grad.stride() == one.stride()
                        one.mul_(0.9)
                        other.copy_(one)


def check_modes(started: Callable[..., accelmgr.Manager]) -> None:
    """Modes and frozen parameters are those of the host's model."""
    torch.manual_seed(9)
    model = Switched()
    oracle = Oracle(model, vectors(4), nprocs=2)
    with started(model, Vectors()) as manager:
        assert manager.step(accumulate=False).loss != pytest.approx(oracle.step(), rel=1e-3), "something is dropped"
        for frozen in (True, False):
            for each in (model, oracle.model):
                each.eval()
                each.layers[0].requires_grad_(not frozen)
            oracle.zero_grad()
            assert manager.step(accumulate=False).loss == pytest.approx(oracle.step(), rel=1e-5)
            assert_close(manager, oracle)
            assert manager.get_aggregated_gradients()[0].any() != frozen
            assert (model.layers[0].weight.grad is None) == frozen


class Normalized(Counted):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("table", torch.arange(4.0), persistent=False)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        self.steps = self.steps + 1
        return {"loss": (self.layers(x) * self.table[1]).square().mean()} | self.counts()


class Images:
    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(1, 4, 4, generator=torch.Generator().manual_seed(index))


class Dropping(Counted):
    """Random numbers of the device and of the CPU. Does what a file says, which it takes away."""

    def __init__(self, folder: Any) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.5), nn.BatchNorm1d(16), nn.Linear(16, 2))
        self._folder = folder

    def tell(self, what: str) -> None:
        (self._folder / what).touch()

    def told(self, what: str) -> bool:
        try:
            (self._folder / what).unlink()
        except FileNotFoundError:
            return False
        return True

    def obey(self) -> None:
        if self.told("die"):
            os.kill(os.getpid(), signal.SIGKILL)
        if self.told("raise"):
            raise ArithmeticError("told to raise")
        if self.told("hang"):
            threading.Event().wait()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
        self.obey()
        noise = 0.1 * torch.rand(2).to(x.device)
        return {"loss": (self.layers(x) * y + noise).square().mean(), "noise": noise.sum()} | self.counts()


def check_resume(start: Callable[..., accelmgr.Manager], tmp_path: pathlib.Path) -> None:
    """A run that is resumed goes on bit for bit, and another device may resume it."""
    torch.manual_seed(4)
    model = Dropping(tmp_path)

    def bits(manager: accelmgr.Manager) -> list[Any]:
        result = manager.step(accumulate=False)
        result.raise_for_status()
        return [result.loss, *(gradient.clone() for gradient in manager.get_aggregated_gradients())]

    with start(model, Vectors(), checkpoint__directory=str(tmp_path), **SHAPE) as manager:
        bits(manager)
        manager.save_checkpoint()
        assert not manager.checkpoints_written(wait=60)[0].error
        expected = bits(manager)
    again = {"checkpoint": {"directory": str(tmp_path), "resume": "latest"}, **SHAPE}
    with start(model, Vectors(), **again) as manager:
        assert same(bits(manager), expected)
    with start(model, Vectors(), **again, device="cpu") as manager:
        assert manager.step().ok
