"""Summed losses (`loss_scaling: sum`, `sum_over`): gradient and loss of a step are those of one large batch."""

from __future__ import annotations

import contextlib
import copy
import os
import pathlib
import signal
from typing import Any

import pytest
import torch
from torch import nn

import accelmgr

LENGTHS = (2, 9, 5, 3, 12, 2, 4, 7, 6, 3, 8)
generator = torch.Generator().manual_seed(0)
ROWS = [torch.randint(0, 11, (n,), generator=generator) for n in LENGTHS]


class Lm(nn.Module):
    """Sums the loss over the tokens that count, and says how many these are."""

    def __init__(self, marker: pathlib.Path | None = None) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.table, self.head = nn.Embedding(11, 6), nn.Linear(6, 11)
        self.marker = marker
        self.weigh = float
        self.says = "tokens"

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
        if self.marker is not None and not self.marker.exists():
            with contextlib.suppress(FileExistsError):  # One of the two runners is first.
                self.marker.touch(exist_ok=False)
                os.kill(os.getpid(), signal.SIGKILL)
        logits = self.head(self.table(tokens)).flatten(0, 1)
        loss = nn.functional.cross_entropy(logits, labels.flatten(), ignore_index=-100, reduction="sum")
        counted = labels.ne(-100).sum()
        right = (logits.argmax(1) == labels.flatten()).sum()
        return {"loss": loss, self.says: self.weigh(counted), "right": right}


def collate(elements: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    longest = max(map(len, elements))
    tokens = torch.stack([nn.functional.pad(e, (0, longest - len(e))) for e in elements])
    labels = torch.stack([nn.functional.pad(e.roll(-1), (0, longest - len(e)), value=-100) for e in elements])
    return {"tokens": tokens, "labels": labels}


def start(model: nn.Module, scaling: str, **options: Any) -> accelmgr.Manager:
    options = {
        "nprocs": 2,
        "batch_size_per_device": 2,
        "grad_accumulation_steps": 2,
        "data__drop_last": False,
        "runners__threads": 1,
        **options,
    }
    return accelmgr.Manager(model, ROWS, collate_fn=collate, loss_scaling=scaling, **options)


def compare(model: Lm, result: Any, rows: list[torch.Tensor], by_tokens: bool, half: bool = False) -> None:
    plain = copy.deepcopy(model)
    plain.zero_grad()
    plain.marker = None
    with torch.autocast("cpu", torch.float16, enabled=half):
        outputs = plain(**collate(rows))
    weight = float(outputs["tokens"]) if by_tokens else 1.0
    (outputs["loss"] / weight).backward()
    close = {"rtol": 2e-2, "atol": 2e-3 if by_tokens else 0.1} if half else {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(*([p.grad for p in each.parameters()] for each in (model, plain)), **close)
    assert result.loss == pytest.approx(outputs["loss"].item() / weight, rel=1e-2 if half else 1e-6)
    assert result.scalars == pytest.approx(
        {"tokens": float(outputs["tokens"]), "right": outputs["right"].item() / weight}
    )


@pytest.mark.parametrize("scaling", ["sum_over(tokens)", "sum"])
@pytest.mark.parametrize("nprocs", [1, 2, 3])
def test_a_step_is_one_large_batch_also_an_uneven_one(scaling: str, nprocs: int) -> None:
    """The second step has the elements that are left, and some runners none."""
    model = Lm()
    with start(model, scaling, nprocs=nprocs, batch_size_per_device=4 // nprocs) as manager:
        each = 2 * nprocs * (4 // nprocs)
        for first in (0, each):
            compare(model, manager.step(), ROWS[first : first + each], scaling != "sum")
            manager.zero_grad()


def test_gradients_of_several_steps_are_added() -> None:
    model = Lm()
    with start(model, "sum_over(tokens)", nprocs=1, grad_accumulation_steps=1) as manager:
        want = [torch.zeros_like(parameter) for parameter in model.parameters()]
        for step in range(3):
            outputs = (plain := Lm())(**collate(ROWS[2 * step : 2 * step + 2]))
            (outputs["loss"] / outputs["tokens"]).backward()
            want = [total + parameter.grad for total, parameter in zip(want, plain.parameters(), strict=True)]
            manager.step().raise_for_status()
        for parameter, total in zip(model.parameters(), want, strict=True):
            torch.testing.assert_close(parameter.grad, total, rtol=1e-5, atol=1e-6)


def test_a_runner_that_was_killed_changes_nothing(tmp_path: pathlib.Path) -> None:
    model = Lm(tmp_path / "killed")
    with start(model, "sum_over(tokens)") as manager:
        result = manager.step()
        assert (result.tries, manager.statistics().replacements) == (2, 1)
        compare(model, result, ROWS[:8], True)


@pytest.mark.parametrize("scaling", ["sum_over(tokens)", "sum"])
def test_the_loss_scale_of_fp16_is_not_in_it(scaling: str) -> None:
    model = Lm()
    with start(model, scaling, runners={"autocast": "fp16", "threads": 1, "loss_scale": {"initial": 1024}}) as manager:
        compare(model, manager.step(), ROWS[:8], scaling != "sum", half=True)


def weighing(function: Any, says: str = "tokens") -> Lm:
    model = Lm()
    model.weigh, model.says = function, says
    return model


def test_a_total_of_0_is_refused_and_adds_nothing() -> None:
    with start(model := weighing(lambda counted: 0 * counted), "sum_over(tokens)") as manager:
        result = manager.step()
        assert result.status == "nonfinite" and result.counted
        assert "'tokens' of the model's outputs adds up to 0 over all micro-batches" in result.error
        assert all(not parameter.grad.any() for parameter in model.parameters())
        with pytest.raises(accelmgr.Nonfinite):
            result.raise_for_status()
    with start(model, "sum_over(tokens)", on_nonfinite="keep") as manager:
        result = manager.step()
        assert (result.status, result.nonfinite, result.loss) == ("ok", True, 0)


@pytest.mark.parametrize(("value", "text"), [(torch.nan, "nan"), (torch.inf, "inf"), (-1.0, "-2")])
def test_a_total_that_is_no_weight_is_refused(value: float, text: str) -> None:
    with start(weighing(lambda counted: value), "sum_over(tokens)") as manager:
        result = manager.step()
        assert result.status == "nonfinite" and not result.counted
        assert f"'tokens' of the model's outputs adds up to {text}, by which loss_scaling" in result.error


def test_outputs_without_the_number_are_refused_with_what_they_have() -> None:
    with start(weighing(float, "words"), "sum_over(tokens)") as manager:
        error = manager.step().error
    assert "loss_scaling is sum_over(tokens), but the model's output has no number 'tokens'; it has the" in error
    assert "numbers: words, right." in error
