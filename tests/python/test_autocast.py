"""Checks `runners.autocast` against torch's own autocast, and the loss scale of fp16 against torch.amp.GradScaler."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from oracle import loss_of
from test_transformers import Elements, gpt2
from torch import nn

import accelmgr
from accelmgr._runner.replica import check_autocast

# The oracle computes with as many threads as a runner, because that decides how sums are rounded.
pytestmark = pytest.mark.usefixtures("one_thread")

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
BATCH = 4
ONE = {"nprocs": 1, "batch_size_per_device": BATCH, "runners__threads": 1}


ROWS = [
    (row, row.sin().sum(0, keepdim=True)) for row in torch.randn(200, 8, generator=torch.Generator().manual_seed(3))
]


class Network(nn.Module):
    """Reports in `half` whether a layer computed in a dtype of 16 bits."""

    def __init__(self, gain: float = 1.0) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 1))
        self.gain = gain

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
        out = self.layers(x)
        return {"loss": nn.functional.mse_loss(out * self.gain, y), "half": float(out.element_size() == 2)}


def network(gain: float = 1.0) -> Network:
    torch.manual_seed(0)
    return Network(gain)


def batches(source: Iterable[Any], ranks: int = 1) -> Iterator[list[Any]]:
    """The batches of all ranks, for each step."""
    elements = iter(source)
    while True:
        dealt = [next(elements) for _ in range(ranks * BATCH)]
        yield [torch.utils.data.default_collate(dealt[rank::ranks]) for rank in range(ranks)]


def gradients(
    model: nn.Module, step: list[Any], dtype: torch.dtype, scale: float = 1.0
) -> tuple[float, list[torch.Tensor]]:
    """Mean loss and gradients of a step, by torch's own autocast."""
    sums, mean = [torch.zeros_like(p) for p in model.parameters()], 0.0
    for batch in step:
        model.zero_grad()
        with torch.autocast("cpu", dtype=dtype):
            loss = loss_of(model(*batch) if isinstance(batch, (list, tuple)) else model(**batch)).float()
        loss = loss / len(step)
        mean += loss.item()
        (loss * scale).backward()
        for total, parameter in zip(sums, model.parameters(), strict=True):
            assert parameter.grad is not None
            total += parameter.grad
    return mean, [total / scale for total in sums]


def assert_same(model: nn.Module, expected: list[torch.Tensor]) -> None:
    for (name, parameter), other in zip(model.named_parameters(), expected, strict=True):
        assert parameter.grad is not None and torch.equal(parameter.grad, other), name


@pytest.mark.parametrize("autocast", ["bf16", "fp16"])
def test_gradients_are_those_of_torchs_own_autocast(autocast: str) -> None:
    model = network()
    plain, steps = copy.deepcopy(model), batches(ROWS)
    scale = 1024.0 if autocast == "fp16" else 1.0
    settings = {"runners__autocast": autocast, "runners__loss_scale": {"initial": 1024, "growth_steps": 0}}
    with accelmgr.Manager(model, ROWS, **ONE, **settings) as manager:
        for _ in range(3):
            result = manager.step(accumulate=False)
            loss, expected = gradients(plain, next(steps), DTYPES[autocast], scale)
            assert (result.loss, result.scalars, result.loss_scale) == (loss, {"half": 1.0}, scale)
            assert_same(model, expected)


def test_a_transformer_in_float16_has_the_gradients_of_torchs_own_autocast() -> None:
    torch.manual_seed(0)
    model = gpt2()
    plain = copy.deepcopy(model)
    elements = Elements(masked=False)
    steps = batches((dict(element.items()) for element in elements), ranks=2)
    with accelmgr.Manager(model, elements, **{**ONE, "nprocs": 2}, runners__autocast="fp16") as manager:
        for _ in range(3):
            result = manager.step(accumulate=False)
            loss, expected = gradients(plain, next(steps), torch.float16, result.loss_scale)
            assert result.loss == pytest.approx(loss, rel=1e-6)
            assert_same(model, expected)


def test_the_scale_is_that_of_gradscaler_and_no_batch_is_left_out() -> None:
    model = network(gain=300.0)
    plain, steps = copy.deepcopy(model), batches(ROWS)
    scaler = torch.amp.GradScaler("cpu", growth_interval=3)
    idle = torch.optim.SGD(plain.parameters(), lr=0.0)
    lowered = 0
    with accelmgr.Manager(model, ROWS, **ONE, runners__autocast="fp16", runners__loss_scale__growth_steps=3) as manager:
        for _ in range(12):
            result = manager.step(accumulate=False)
            step, tries, scale = next(steps), 0, 0.0
            while scale != scaler.get_scale():  # Again, after each overflow.
                scale, tries = scaler.get_scale(), tries + 1
                idle.zero_grad()
                with torch.autocast("cpu", dtype=torch.float16):
                    loss = plain(*step[0])["loss"]
                scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
                scaler.unscale_(idle)
                overflow = not all(torch.isfinite(p.grad).all() for p in plain.parameters() if p.grad is not None)
                scaler.step(idle)
                scaler.update()
                if not overflow:
                    break
            assert (result.loss_scale, result.tries, result.loss_scale_lowered) == (scale, tries, tries - 1)
            assert_same(model, [p.grad for p in plain.parameters() if p.grad is not None])
            lowered += result.loss_scale_lowered
        assert lowered > 2 and manager.statistics().elements == 12 * BATCH
        everything = json.loads(json.dumps(result.to_dict()))
        assert (everything["loss_scale"], everything["loss_scale_lowered"]) == (scale, tries - 1)


def test_a_device_without_the_dtype_is_refused_in_words() -> None:
    check_autocast("off", torch.device("meta"))
    check_autocast("fp16", torch.device("cpu"))
    with pytest.raises(accelmgr.ConfigError, match=r"runners.autocast is fp16, but torch .* in torch.float16 on meta"):
        check_autocast("fp16", torch.device("meta"))
    with pytest.raises(accelmgr.ConfigError, match=r"loss_scale.initial is 1000; it must be a power of two"):
        accelmgr.Manager(network(), ROWS, **ONE, runners__loss_scale__initial=1000)
