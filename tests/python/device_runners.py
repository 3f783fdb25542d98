"""What tests of runners on devices share: a manager on them (XLA unless said otherwise), data, models, tolerances."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from oracle import Oracle
from torch import nn
from vectors import Vectors, vectors

import accelmgr

TOLERANCE = 1e-5  # Of a gradient's norm.
BF16_TOLERANCE = 2**-8 * 4  # A product of numbers that have 8 bits, over the few layers of these models.
SHAPE = {"batch_size_per_device": 3, "grad_accumulation_steps": 2}

Start = Callable[..., accelmgr.Manager]

# LLVM's optimization takes half of the time in which a runner compiles, and these models gain nothing by it.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")


def start(model: Any, dataset: Any, **options: Any) -> accelmgr.Manager:
    fixed = {"nprocs": 2, "device": "xla", "runners__threads": 1, "seed_base": 7, "runners__restart_backoff": 0.01}
    fixed["start_method"] = "forkserver"  # The libraries of fakes are found by variables that a new process reads.
    return accelmgr.Manager(model, dataset, **{**fixed, **options})


class Does:
    """Calls a function in a process that unpickles it."""

    def __init__(self, function: Callable[[], object]) -> None:
        self._function = function

    def __reduce__(self) -> Any:
        return self._function, ()


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


def follow(model: nn.Module, oracle: Oracle) -> None:
    with torch.no_grad():
        for one, other in zip(model.parameters(), oracle.model.parameters(), strict=True):
            other.copy_(one)


def train(
    start: Start,
    model: nn.Module,
    dataset: Any,
    elements: Any,
    steps: int = 3,
    replacements: int = 0,
    **options: Any,
) -> list[accelmgr.StepResult]:
    """Trains for some steps, and checks losses and gradients of each."""
    shape = {
        key: options.get(key, default)
        for key, default in (("nprocs", 2), ("batch_size_per_device", 1), ("grad_accumulation_steps", 1))
    }
    oracle = Oracle(model, elements, **shape, collate_fn=options.get("collate_fn"))
    results = []
    with start(model, dataset, **options) as manager:
        addresses = [parameter.data_ptr() for parameter in model.parameters()]
        for step in range(steps):
            results.append(manager.step(accumulate=step % 2 == 1))
            results[-1].raise_for_status()
            if step % 2 == 0:
                oracle.zero_grad()
            assert results[-1].loss == pytest.approx(oracle.step(), rel=1e-5)
            assert_close(manager, oracle)
            with torch.no_grad():
                for parameter, gradient in zip(model.parameters(), manager.get_aggregated_gradients(), strict=True):
                    parameter.sub_(0.01 * gradient.clamp(-1, 1) + 0.001 * parameter)
            follow(model, oracle)
        assert manager.statistics().replacements == replacements
    assert [parameter.data_ptr() for parameter in model.parameters()] == addresses
    return results


def bits_of(manager: accelmgr.Manager) -> tuple[list[Any], accelmgr.StepResult]:
    """Everything that the next step gives, bit for bit: first a tuple of loss and random numbers. And its result."""
    result = manager.step(timeout=60, accumulate=False)
    result.raise_for_status()
    drawn = [result.scalars[name] for name in ("noise", "drawn") if name in result.scalars]
    tensors = [*manager.get_aggregated_gradients(), *(buffer for _, buffer in sorted(manager.buffers().items()))]
    return [(result.loss, *drawn), *map(torch.clone, tensors)], result


def trained(
    start: Start, model: Dropping, faults: dict[int, str], steps: int = 5, timeouts: int = 0, **options: Any
) -> tuple[list[Any], list[accelmgr.StepResult]]:
    """Everything that some steps give, bit for bit; and their results. Some steps before them end by a timeout."""
    bits: list[Any] = []
    results = []
    with start(model, Vectors(), **SHAPE, **options) as manager:
        pids = [runner.pid for runner in manager.statistics().runners]
        for _ in range(timeouts):
            assert manager.step(timeout=0.1, accumulate=False).status == "timeout"
        for step in range(steps):
            if step in faults:
                model.tell(faults[step])
            found, result = bits_of(manager)
            bits += found
            results.append(result)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.01 * parameter.grad
        assert faults or pids == [runner.pid for runner in manager.statistics().runners]
    return bits, results


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


def check_frozen_parameters(started: Start, **options: Any) -> None:
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


class Normalized(Counted):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("table", torch.arange(4.0), persistent=False)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        self.steps = self.steps + 1
        return {"loss": (self.layers(x) * self.table[1]).square().mean()} | self.counts()


IMAGES = torch.randn(1000, 1, 4, 4, generator=torch.Generator().manual_seed(0)).unbind()


def check_buffers(start: Start, micro_batches: int, steps: int, **options: Any) -> None:
    """Those of a model with batch norm. The host changes one before the last two steps."""
    torch.manual_seed(3)
    model = Normalized()
    shape = {"nprocs": 1, "batch_size_per_device": 5, "grad_accumulation_steps": micro_batches}
    oracle = Oracle(model, iter(IMAGES), **shape)
    with start(model, IMAGES, **shape, **options) as manager:
        for step in range(steps):
            if step == steps - 2:
                for each in (model, oracle.model):
                    each.layers[1].running_mean.fill_(0.5)
            oracle.zero_grad()
            assert manager.step(accumulate=False).loss == pytest.approx(oracle.step(), rel=1e-5)
            assert_close(manager, oracle)
            theirs = dict(oracle.model.named_buffers())
            for name, buffer in manager.buffers().items():
                torch.testing.assert_close(buffer, theirs[name])
        assert manager.buffers()["steps"] == steps * micro_batches


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


def made(failing: Callable[[Any], Dropping], folder: Any) -> Dropping:
    torch.manual_seed(4)
    return failing(folder)
