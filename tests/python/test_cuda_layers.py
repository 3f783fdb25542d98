"""Parameters of layers that are on their way while others compute, against plain PyTorch on the CPU. The device is the
fake of cuda_runners.py, which copies no more than what is waited for (in runners with even numbers)."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from cuda_runners import GPU, LIBRARY, on_the_fake, start
from device_runners import Vectors, assert_close, vectors
from oracle import Oracle
from test_cuda_numbers import follow, train
from torch import nn

LAYERS = 4
SHAPE = {"nprocs": 1, "batch_size_per_device": 2, "runners__overlap_parameters": True}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.norm(torch.tanh(self.inner(x)))


class Deep(nn.Module):
    """Does what is asked of it, from its second micro-batch on if it `learns` first."""

    def __init__(self, what: str = "", late: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.more = nn.Sequential(Block(), nn.ReLU(), Block())
        self.last = nn.Linear(4, 2)
        self._what = what
        self._late = late
        self._calls = 0
        if what == "ties":
            self.layers[3].inner.weight = self.layers[1].inner.weight
            self.layers[2].norm.weight = self.more[0].norm.weight
            self.last.weight = nn.Parameter(self.layers[0].inner.weight.data[:2])

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
        if self._late:
            self._calls += 1
        what = "" if self._late and self._calls == 1 else self._what
        seen = self.seen_at_the_beginning()
        loss = 0.01 * sum(layer.inner.weight.square().sum() for layer in self.layers) if what == "uses" else 0.0
        x = self.first(x)
        layers = list(self.layers)
        if what == "reverses":
            layers.reverse()
        if what == "skips":
            layers = layers[1::2]
        if what == "repeats":
            layers = [*layers[:2], *layers[:2]]
        if what == "adds":
            x = x + nn.functional.linear(x, self.layers[1].inner.weight)
        for layer in layers:
            x = layer(x)
        x = self.more(x)
        loss = loss + (self.last(x) - y).square().mean()
        return {"loss": loss} if what == "plain" else {"loss": loss, "seen": seen}

    def seen_at_the_beginning(self) -> float:
        """What the fake has of the last layer when a micro-batch begins. Nobody is asked for it."""
        weight = self.more[2].norm.bias
        return 0.0 if GPU or not weight.numel() else ctypes.c_float.from_address(weight.data_ptr()).value


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize(
    ("what", "late"),
    [
        ("", False),
        ("ties", False),
        ("uses", False),
        ("reverses", False),
        ("reverses", True),
        ("skips", False),
        ("skips", True),
        ("repeats", True),
        ("adds", False),
    ],
)
def test_a_model_of_layers_trains_as_on_the_cpu(what, late, micro_batches):
    torch.manual_seed(1)
    train(Deep(what, late), Vectors(), vectors(4), steps=5, grad_accumulation_steps=micro_batches, **SHAPE)


@on_the_fake
def test_a_layer_computes_while_the_next_ones_are_on_their_way():
    torch.manual_seed(1)
    model = Deep()
    oracle = Oracle(model, vectors(4), batch_size_per_device=2)
    seen = []
    with start(model, Vectors(), **SHAPE) as manager:
        for step in range(4):
            with torch.no_grad():
                model.more[2].norm.bias.fill_(step + 1.0)
            follow(model, oracle)
            oracle.zero_grad()
            result = manager.step(accumulate=False)
            assert result.loss == pytest.approx(oracle.step(), rel=1e-5)
            assert_close(manager, oracle)
            seen.append(result.scalars["seen"])
    assert seen == [1, 1, 2, 3], "all are there for the first micro-batch; those of the last layer come later then"


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"nccl": str(LIBRARY)}, id="team", marks=on_the_fake),
        pytest.param({"runners__cuda_graph": "auto"}, id="graphs"),
    ],
)
def test_with_others_that_wait_for_parameters(options):
    torch.manual_seed(1)
    train(Deep("plain"), Vectors(), vectors(4), steps=7, **{**SHAPE, "nprocs": 2, **options})
