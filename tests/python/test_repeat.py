"""Steps that compute on the elements of the last one again (`step(repeat=True)`)."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from launching import kill
from torch import nn

import accelmgr


class Sum(nn.Module):
    """The gradient of `weight` is the mean of the batch's elements."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).mean()


WINDOW = 40  # Powers of two that a sum of float64 tells apart, divided and multiplied. A step takes fewer than half.


def numbers(count: int) -> list[torch.Tensor]:
    """So that sums tell which elements there were: element i is 2 to the power of i mod WINDOW."""
    return [torch.tensor(2.0 ** (index % WINDOW), dtype=torch.float64) for index in range(count)]


def start(model: nn.Module, count: int = 48, **options) -> accelmgr.Manager:
    data = {"keep_last_step": True, **options.pop("data", {})}
    options = {"nprocs": 2, "batch_size_per_device": 2, "start_method": "forkserver", **options}
    return accelmgr.Manager(model, numbers(count), data=data, **options)


def elements_of(model: Sum, samples: int) -> list[int]:
    """The numbers mod WINDOW of the elements of a step that overwrote gradients."""
    total = round(model.weight.grad.item() * samples)
    return [index for index in range(total.bit_length()) if total >> index & 1]


def ranks_step(manager: accelmgr.Manager, model: Sum, repeat: bool = False) -> list[int]:
    result = manager.step(accumulate=False, repeat=repeat)
    result.raise_for_status()
    return elements_of(model, result.samples)


@settings(
    max_examples=10, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.explicit, Phase.generate]
)
@given(
    seed=st.integers(0, 10_000),
    nprocs=st.integers(1, 3),
    accumulation=st.integers(1, 3),
    prefetch=st.integers(0, 5),
    drop_last=st.booleans(),
)
@example(seed=7578, nprocs=3, accumulation=3, prefetch=5, drop_last=False)
def test_any_step_may_be_repeated_any_number_of_times(seed, nprocs, accumulation, prefetch, drop_last):
    rng = random.Random(seed)
    model = Sum()
    size = 2 * nprocs * accumulation
    count = 3 * size + rng.randrange(size)
    shape = {"nprocs": nprocs, "grad_accumulation_steps": accumulation, "prefetch": prefetch, "loss_scaling": "samples"}
    with start(model, count, data={"drop_last": drop_last}, **shape) as manager:
        consumed = 0
        steps = 0
        while (result := manager.step(accumulate=False)).ok:
            expected = sorted(index % WINDOW for index in range(consumed, consumed + result.samples))
            assert elements_of(model, result.samples) == expected
            for _ in range(rng.randrange(4)):
                if rng.random() < 0.2:
                    kill(manager.statistics().runners[0].pid)
                assert ranks_step(manager, model, repeat=True) == expected
                steps += 1
            consumed += result.samples
            steps += 1
            assert (manager.statistics().elements, manager.statistics().steps) == (consumed, steps)
        assert result.status == "data_end"
        assert consumed == (3 * size if drop_last else count)


def test_a_manager_that_recovers_repeats_the_step_before():
    model = Sum()
    with start(model) as manager:
        assert ranks_step(manager, model) == [0, 1, 2, 3]
        kill(manager.statistics().manager_pid)
        assert manager.step(repeat=True).status == "manager_lost"
        manager.recover()
        assert ranks_step(manager, model, repeat=True) == [0, 1, 2, 3]
        assert ranks_step(manager, model) == [4, 5, 6, 7]


def test_what_cannot_be_repeated():
    with accelmgr.Manager(Sum(), numbers(8)) as manager:
        assert manager.step().ok
        with pytest.raises(accelmgr.UsageError, match=r"data\.keep_last_step"):
            manager.step(repeat=True)
    model = Sum()
    with start(model, runners={"max_runners": 3}) as manager:
        with pytest.raises(accelmgr.UsageError, match="no step to repeat"):
            manager.step(repeat=True)
        assert ranks_step(manager, model) == [0, 1, 2, 3]
        manager.resize(3)
        result = manager.step(repeat=True)
        assert (result.status, result.counted) == ("runner_lost", False)
        assert "the team is no longer the one that made it" in result.error
        assert ranks_step(manager, model) == [4, 5, 6, 7, 8, 9], "and the run goes on"
        assert ranks_step(manager, model, repeat=True) == [4, 5, 6, 7, 8, 9]


class Long(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, text: str) -> torch.Tensor:
        return self.weight * len(text)


def test_long_elements_stay_for_a_repetition():
    texts = ["x" * 10] * 4 + ["y" * 100_000 * (i + 1) for i in range(8)]
    model = Long()
    with accelmgr.Manager(
        model, texts, nprocs=1, collate_fn=lambda texts: {"text": texts[0]}, data={"keep_last_step": True}
    ) as manager:
        for text in texts:
            for repeat in (False, True, True):
                manager.step(accumulate=False, repeat=repeat).raise_for_status()
                assert model.weight.grad.item() == len(text)


def test_lbfgs_must_evaluate_on_the_same_elements():
    model = nn.Linear(1, 1)
    data = [{"input": torch.tensor([float(i)])} for i in range(40)]
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return (self.model(input) - 1).square().mean()

    with accelmgr.Manager(Loss(), data) as manager:
        with pytest.raises(accelmgr.UsageError, match="keep_last_step"):
            optimizer.step(lambda: manager.step().loss)
        with pytest.raises(accelmgr.UsageError, match="keep_last_step"):
            manager.check_optimizer(optimizer)
    with accelmgr.Manager(Loss(), data, data={"keep_last_step": True}) as manager:
        manager.check_optimizer(optimizer)
        for _ in range(2):
            optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
            with pytest.raises(accelmgr.UsageError, match=r"step\(repeat=True\)"):
                optimizer.step(lambda: manager.step().loss)
            assert manager.step().ok, "outside of LBFGS any step may be made"
