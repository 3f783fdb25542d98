"""Holds tools/examples/transformers_trainer.py against the plain transformers.Trainer."""

from __future__ import annotations

import copy
import os
import pathlib
import sys
from typing import Any

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # Tests must not use the network.
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate, which transformers.Trainer needs, is not installed")
if not transformers.is_torch_available():
    _reason = f"transformers {transformers.__version__} does not take torch {torch.__version__}"
    pytest.skip(_reason, allow_module_level=True)
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tools" / "examples"))
from transformers_trainer import ManagedTrainer  # noqa: E402

LENGTH, VOCABULARY, BATCH, STEPS = 16, 256, 8, 6
SIZES = {"vocab_size": VOCABULARY, "n_positions": LENGTH, "n_embd": 32, "n_layer": 2, "n_head": 2}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}  # Runners draw other random numbers.


def rows() -> list[dict[str, torch.Tensor]]:
    """Random tokens. Each row has labels at another number of places, so runners have different numbers of them."""
    found = []
    for index in range(40):
        tokens = torch.randint(VOCABULARY // 8, (LENGTH,), generator=torch.Generator().manual_seed(index))
        found.append({"input_ids": tokens, "labels": tokens.masked_fill(torch.arange(LENGTH) > 3 + index % 12, -100)})
    return found


def trained(make: Any, model: torch.nn.Module, folder: pathlib.Path, **options: Any) -> list[dict[str, float]]:
    """Trains, and returns what was logged of each step: loss, and norm of the gradient before it is clipped."""
    arguments = transformers.TrainingArguments(
        str(folder), per_device_train_batch_size=BATCH, max_steps=STEPS, logging_steps=1, learning_rate=1e-2,
        dataloader_drop_last=True, use_cpu=True, disable_tqdm=True, report_to=[], save_strategy="no", **options,
    )  # fmt: skip
    trainer = make(model, arguments, train_dataset=rows())
    trainer.train()
    return [{name: line[name] for name in ("loss", "grad_norm")} for line in trainer.state.log_history[:STEPS]]


@pytest.mark.parametrize("accumulation", [1, 2])
def test_losses_are_those_of_the_plain_trainer(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, accumulation: int
) -> None:
    monkeypatch.setenv("ACCELMGR_START_TIMEOUT", "400")  # Importing transformers took 120 s on a machine with load 25.
    config = transformers.GPT2Config(**SIZES, **NO_DROPOUT, bos_token_id=None, eos_token_id=None)
    torch.manual_seed(3)
    model = transformers.GPT2LMHeadModel(config)
    plain = copy.deepcopy(model)
    found = trained(ManagedTrainer, model, tmp_path / "managed", gradient_accumulation_steps=accumulation)
    expected = trained(transformers.Trainer, plain, tmp_path / "plain", gradient_accumulation_steps=accumulation)
    assert expected[-1]["loss"] < expected[0]["loss"] - 0.5
    # Losses differed by up to 2e-7 of their size, norms by 5e-7: sums have another order, and Adam magnifies that.
    for step, (own, other) in enumerate(zip(found, expected, strict=True)):
        assert own["loss"] == pytest.approx(other["loss"], rel=1e-5), step
        assert own["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4), step


def test_batches_that_runners_cannot_divide_are_refused(tmp_path: pathlib.Path) -> None:
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**SIZES, bos_token_id=None, eos_token_id=None))
    for options in ({}, {"dataloader_drop_last": True, "per_device_train_batch_size": 3}):
        with pytest.raises(ValueError, match="2 runners must be able to divide the batch size"):
            ManagedTrainer(model, transformers.TrainingArguments(str(tmp_path), use_cpu=True, **options))
