"""Buffers that forward() and the host write in turn: the numbers are those of plain PyTorch."""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import update_bn

import accelmgr

SIZE = 4
STEPS = 6
DATA = list(torch.randn(2 * STEPS * SIZE, 3, generator=torch.Generator().manual_seed(1)))


class Recurrent(nn.Module):
    """Its state goes from batch to batch: assigned, or written in place; None or zeros at the start of a sequence."""

    def __init__(self, assigns: bool = True, begins_with_none: bool = False) -> None:
        super().__init__()
        self.assigns = assigns
        self.cell = nn.GRUCell(3, 5)
        self.register_buffer("zeros", torch.zeros(SIZE, 5))
        self.register_buffer("h", None if begins_with_none else torch.zeros(SIZE, 5), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.cell(x, self.h.clone() if self.h is not None else None)
        if self.assigns:
            self.h = h.detach()
        else:
            self.h.copy_(h.detach())
        return h.square().mean()


def assign_zeros_of_the_model(model: Recurrent) -> None:
    model.h = model.zeros


def assign_none(model: Recurrent) -> None:
    model.h = None


def zero_in_place(model: Recurrent) -> None:
    model.h.zero_()


def zero_without_a_trace(model: Recurrent) -> None:
    model.h.data.zero_()


def compare(model: nn.Module, between: Callable[[nn.Module], None], **options: object) -> accelmgr.Manager:
    """Calls `between` before every second step, and compares losses, gradients and buffers with plain PyTorch."""
    plain = copy.deepcopy(model)
    options = {"nprocs": 1, "batch_size_per_device": SIZE, "runners__threads": 1, **options}
    with accelmgr.Manager(model, DATA, **options) as manager:
        for step in range(STEPS):
            if step % 2 == 0:
                between(plain)
                between(model)
            plain.zero_grad()
            loss = plain(torch.stack(DATA[step * SIZE : (step + 1) * SIZE]))
            loss.backward()
            assert manager.step(accumulate=False).loss == pytest.approx(loss.item(), rel=1e-6), step
            for one, other in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(one.grad, other.grad)
            for (name, one), other in zip(model.named_buffers(), plain.buffers(), strict=True):
                torch.testing.assert_close(one, other, msg=f"{name} in step {step}")
    return manager


@pytest.mark.parametrize("start_method", ["spawn", "forkserver", "fork"])
def test_a_state_begins_as_none_and_is_set_to_none(start_method):
    compare(Recurrent(begins_with_none=True), assign_none, start_method=start_method)


@pytest.mark.parametrize("policy", ["rank0", "mean"])
@pytest.mark.parametrize(
    ("assigns", "reset"),
    [
        (True, assign_zeros_of_the_model),
        (True, assign_none),
        (True, zero_in_place),
        (False, zero_in_place),
        (False, zero_without_a_trace),
    ],
)
def test_a_state_is_reset(assigns, reset, policy):
    compare(Recurrent(assigns), reset, buffers__policy=policy)


def test_a_tensor_that_was_assigned_stays_what_it_is():
    zeros = torch.zeros(SIZE, 5)

    def reset(model: Recurrent) -> None:
        model.h = zeros

    compare(Recurrent(), reset)
    assert torch.equal(zeros, torch.zeros(SIZE, 5))


class Remembers(Recurrent):
    """The first state is an attribute, too, and the last two are in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.initial = self.h
        self.last: list[torch.Tensor] = [self.h, self.h]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = [self.last[-1], self.h]
        loss = super().forward(x + self.last[0].mean() - self.last[1].mean())
        return loss + self.initial.square().sum()


def test_what_the_model_has_kept_of_its_buffers_stays_what_it_is():
    compare(Remembers(), lambda model: None)


class Normalized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Linear(6, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x).square().mean()


def sample(model: Normalized) -> None:
    """As a GAN does in the host, with the generator in training mode."""
    with torch.no_grad():
        for _ in range(3):
            model.body(torch.ones(8, 3).cumsum(0))


def estimate(model: Normalized) -> None:
    update_bn([torch.ones(8, 3).cumsum(0)], model.body)


@pytest.mark.parametrize("between", [sample, estimate])
def test_statistics_that_the_host_updates_are_those_of_the_runners(between):
    compare(Normalized(), between)


def test_a_replacement_has_the_state_and_the_host_writes_nothing():
    """Each of two runners has a state of its own, which no other one gets."""
    torch.manual_seed(0)
    model = Recurrent(begins_with_none=True)
    plain = [copy.deepcopy(model) for _ in range(2)]
    options = {"nprocs": 2, "batch_size_per_device": SIZE, "runners__threads": 1}
    with accelmgr.Manager(model, DATA, **options) as manager:
        for step in range(STEPS):
            batch = torch.stack(DATA[2 * step * SIZE : 2 * (step + 1) * SIZE])
            losses = [each(batch[rank::2]).item() for rank, each in enumerate(plain)]
            if step == 3:
                os.kill(manager.statistics().runners[1].pid, signal.SIGKILL)
            assert manager.step().loss == pytest.approx(sum(losses) / 2, rel=1e-6), step
        assert torch.equal(model.h, plain[0].h)
        assert manager.statistics().replacements == 1


def test_a_buffer_that_is_none_may_become_a_tensor_later():
    class Late(Normalized):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0
            self.register_buffer("last", None)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            if self.calls > 2:
                self.last = x.mean(0)
            return super().forward(x)

    with accelmgr.Manager(Late(), DATA, nprocs=1, batch_size_per_device=SIZE) as manager:
        assert [manager.step().ok for _ in range(4)] == [True] * 4
