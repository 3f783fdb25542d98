"""Every module of torch's own tests as a CUDA graph, bit for bit against itself without one. The graphs are the
fakes of cuda_runners.py; no manager takes part."""

from __future__ import annotations

import collections
import copy
from typing import Any

import pytest
import torch
from cuda_runners import FakeCuda
from differential import why_unfit
from test_modules import cases
from torch import nn

from accelmgr._runner.graphs import WARM_UP, Graphs

MICRO_BATCHES = 3
LOOK_AT_VALUES = {"BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "CTCLoss", "GaussianNLLLoss"} | {
    "Transformer",
    "TransformerEncoder",
}
"""Some of each do: batch norms without momentum, and transformers that ask whether their mask is the causal one."""


class Gradients:
    """That which is copied nowhere."""

    def begin_recording(self) -> None:
        pass

    def end_recording(self) -> tuple[list[int], list[int]]:
        return [], []

    def replayed(self, order: list[int], complete: list[int]) -> None:
        pass


def attempt(case: nn.Module, graphs: Graphs | None, number: int) -> tuple[list[torch.Tensor], list[Any]]:
    """Losses and gradients of three micro-batches, whose inputs differ by a factor."""

    def compute(factor: Any, divisor: torch.Tensor) -> tuple[torch.Tensor, list[Any]]:
        loss = case(factor) / divisor
        loss.backward()
        return loss.detach(), []

    torch.manual_seed(number)
    losses = []
    for parameter in case.parameters():
        parameter.grad = None
    if graphs is not None:
        graphs.begin_attempt()
    for index in range(MICRO_BATCHES):
        factor, divisor = torch.tensor(1 - 0.02 * number - 0.01 * index), torch.tensor(1.0 + number)
        last = index + 1 == MICRO_BATCHES
        loss, _ = compute(factor, divisor) if graphs is None else graphs.run(factor, divisor, last, compute)
        losses.append(loss)
    if graphs is not None:
        graphs.end_attempt()
    return losses, [None if each.grad is None else each.grad.clone() for each in case.parameters()]


def test_every_module_of_torch_is_recorded_or_refused(monkeypatch):
    cuda = FakeCuda(0)
    fit = {name: case for name, case in cases() if why_unfit(case) is None}
    monkeypatch.setattr("differential.factor_of", lambda factor: factor)
    refused: dict[str, list[str]] = collections.defaultdict(list)
    for name, case in fit.items():
        plain = copy.deepcopy(case)
        graphs = Graphs(case, cuda, list(case.parameters()), Gradients(), refused[name].append)
        for number in range(WARM_UP + 3):
            losses, gradients = attempt(case, graphs, number)
            expected_losses, expected_gradients = attempt(plain, None, number)
            assert [*map(float, losses)] == pytest.approx([*map(float, expected_losses)], rel=0, abs=0), name
            for one, other in zip(gradients, expected_gradients, strict=True):
                assert one is other is None or torch.equal(one, other), name
            for one, other in zip(case.buffers(), plain.buffers(), strict=True):
                assert torch.equal(one, other), name
    told = {name: texts[0].partition("by itself: ")[2] for name, texts in refused.items() if texts}
    assert all("waits for values of the device (aten." in text for text in told.values()), told
    assert {name.split("_")[1] for name in told} <= LOOK_AT_VALUES, told
    assert len(fit) - len(told) >= 350
