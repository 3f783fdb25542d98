"""What models return: the loss is found wherever it has its name, numbers arrive, and the rest is refused in words."""

from __future__ import annotations

import collections
import dataclasses
import re
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import accelmgr
from accelmgr._runner.outputs import read_outputs

Parts = collections.namedtuple("Parts", "reconstruction divergence loss")
Logits = collections.namedtuple("Logits", "logits hidden")


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    loss: torch.Tensor
    accuracy: float = 0.25


@dataclasses.dataclass
class Headless:
    logits: torch.Tensor


def loss_of(value: float = 2.0) -> torch.Tensor:
    return torch.tensor(float(value), requires_grad=True) * 1


LOSS, LOGITS = loss_of(), torch.ones(4, 2, requires_grad=True)


class Returns(nn.Module):
    """Of each kind of output; the loss is 2, other numbers are not."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.kind = kind

    def forward(self, x: torch.Tensor) -> Any:
        loss = (self.weight * x).mean()
        if self.kind == "named tuple":
            return Parts(0.1 * loss, 0.9 * loss, loss)
        if self.kind == "dataclass":
            return Output(x, loss)
        numbers = {"a": numpy.float32(1.5), "b": numpy.int64(3), "c": numpy.array(4.0), "d": loss.detach()[None]}
        return {"loss": loss, **numbers, "text": "x", "array": numpy.ones(2)}


@pytest.mark.parametrize(
    ("kind", "scalars"),
    [
        ("named tuple", {"reconstruction": 0.2, "divergence": 1.8}),
        ("dataclass", {"accuracy": 0.25}),
        ("numpy", {"a": 1.5, "b": 3.0, "c": 4.0, "d": 2.0}),
    ],
)
def test_the_field_loss_trains_and_other_numbers_arrive(kind: str, scalars: dict[str, float]) -> None:
    model = Returns(kind)
    with accelmgr.Manager(model, [2.0] * 8, nprocs=2, batch_size_per_device=2, runners__threads=1) as manager:
        result = manager.step()
        result.raise_for_status()
        assert model.weight.grad is not None and model.weight.grad.item() == 2
    assert (result.loss, result.scalars) == (2, pytest.approx(scalars))


@pytest.mark.parametrize(
    ("outputs", "place", "says"),
    [
        (Logits(LOGITS, LOSS), None, "the model's output has no 'loss'; it has: logits, hidden"),
        (Headless(LOGITS), None, "the model's output has no 'loss'; it has: logits"),
        ((LOGITS, None, LOSS), None, "it must be one floating-point number (element 2 of what the model"),
        ((None, LOSS), None, "element 1 of what the model returned is one: pass Manager(model, ..., loss=1)"),
        (LOGITS, None, "reduce it, by mean(); or, if the script computes the loss of what the model returns"),
        ((LOGITS, LOSS), 2, "the model returned a tuple of 2; loss=2 is none of its elements"),
        (LOSS, 1, "loss=1 is a position in a tuple, and the model returned a Tensor"),
        ((LOGITS, LOSS), "nll", "loss='nll' is a name, and the model returned a tuple without any"),
        ({"loss": LOSS}, "nll", "the model's output has no 'nll'; it has: loss"),
        ({"logits": LOGITS, "labels": LOSS}, None, "the model's output has no 'loss'; it has: logits, labels"),
        (torch.ones(()), None, "the loss does not require a gradient"),
        (torch.ones((), dtype=torch.int64), None, "the loss is torch.int64 of shape []; it must be one floating-point"),
        ((), None, "returned an empty tuple; its first element must be the loss"),
        ({"loss": 3.0}, None, "loss is of type float; it must be a tensor"),
    ],
)  # fmt: skip
def test_what_has_no_loss_is_refused_with_what_it_has(outputs: Any, place: int | str | None, says: str) -> None:
    with pytest.raises(accelmgr.ModelError, match=re.escape(says)):
        read_outputs(outputs, place)


@pytest.mark.parametrize(
    ("outputs", "place", "scalars"),
    [
        ((LOGITS, LOSS), 1, {}),
        ([LOGITS, LOSS], -1, {}),
        (Parts(loss_of(1), loss_of(3), LOSS), 2, {"reconstruction": 1, "divergence": 3}),
        (Parts(LOSS, loss_of(3), loss_of(1)), "reconstruction", {"divergence": 3, "loss": 1}),
        ({"nll": LOSS, "loss": 4}, "nll", {"loss": 4}),
    ],
)
def test_the_place_of_the_loss_may_be_named(outputs: Any, place: int | str, scalars: dict[str, float]) -> None:
    loss, numbers = read_outputs(outputs, place)
    assert loss is LOSS and {name: float(value) for name, value in numbers} == scalars
