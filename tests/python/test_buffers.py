"""Buffers that forward() and the host write in turn: the numbers are those of plain PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import launching
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import update_bn

import accelmgr

SIZE = 4
STEPS = 8
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


Between = Callable[[Any, int], None]
"""What the host does to the model before the step of that number."""


def never(model: nn.Module, step: int) -> None:
    pass


def every_second(change: Callable[[Any], None]) -> Between:
    return lambda model, step: change(model) if step % 2 == 0 else None


def compare(
    model: nn.Module,
    between: Between,
    state_of: Callable[[nn.Module], dict[str, Any]] = lambda model: dict(model.named_buffers()),
    kill_before: tuple[int, ...] = (),
    **options: Any,
) -> accelmgr.Manager:
    """Compares losses, gradients and the state of rank 0 with those of a model of plain PyTorch for each runner. The
    last runner is killed before some steps."""
    options = {"nprocs": 1, "batch_size_per_device": SIZE, "runners__threads": 1, **options}
    ranks = options["nprocs"]
    plain = [copy.deepcopy(model) for _ in range(ranks)]
    with accelmgr.Manager(model, DATA, **options) as manager:
        for step in range(STEPS):
            for each in (*plain, model):
                between(each, step)
            if step in kill_before:
                launching.kill(manager.statistics().runners[-1].pid)
            batch = torch.stack(DATA[ranks * step * SIZE : ranks * (step + 1) * SIZE])
            losses = []
            for rank, each in enumerate(plain):
                each.zero_grad()
                loss = each(batch[rank::ranks])
                loss.backward()
                losses.append(loss.item())
            assert manager.step(accumulate=False).loss == pytest.approx(sum(losses) / ranks, rel=1e-6), step
            for one, *others in zip(model.parameters(), *(each.parameters() for each in plain), strict=True):
                torch.testing.assert_close(one.grad, sum(other.grad for other in others) / ranks)
            torch.testing.assert_close(state_of(model), state_of(plain[0]), msg=lambda text: f"step {step}: {text}")  # noqa: B023
        assert manager.statistics().replacements == len(kill_before)
    return manager


@pytest.mark.parametrize("start_method", ["spawn", "forkserver", "fork"])
def test_a_state_begins_as_none_and_is_set_to_none(start_method):
    compare(Recurrent(begins_with_none=True), every_second(assign_none), start_method=start_method)


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
    compare(Recurrent(assigns), every_second(reset), buffers__policy=policy)


def test_a_tensor_that_was_assigned_stays_what_it_is():
    zeros = torch.zeros(SIZE, 5)

    def reset(model: Recurrent) -> None:
        model.h = zeros

    compare(Recurrent(), every_second(reset))
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
    compare(Remembers(), never)


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
    compare(Normalized(), every_second(between))


def test_a_replacement_has_the_state_and_the_host_writes_nothing():
    """Each of two runners has a state of its own, which no other one gets."""
    compare(Recurrent(begins_with_none=True), never, nprocs=2, kill_before=(3,))


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
