"""Trains a model of transformers on batches that are its mappings. test_architectures.py has their gradients."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # Tests must not use the network.
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
if not transformers.is_torch_available():
    _reason = f"transformers {transformers.__version__} does not take torch {torch.__version__}"
    pytest.skip(_reason, allow_module_level=True)

import accelmgr  # noqa: E402

LENGTH = 16
VOCABULARY = 256


def gpt2() -> torch.nn.Module:
    sizes = {"vocab_size": VOCABULARY, "n_positions": LENGTH, "n_embd": 32, "n_layer": 2, "n_head": 2}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}  # Runners draw different random numbers.
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **dropout, bos_token_id=0, eos_token_id=0))


def element(index: int, masked: bool) -> dict[str, torch.Tensor]:
    """Random tokens. With `masked` every fourth is hidden, and only hidden tokens have labels."""
    generator = torch.Generator().manual_seed(index)
    tokens = torch.randint(4, VOCABULARY // 8, (LENGTH,), generator=generator)
    if not masked:
        return {"input_ids": tokens, "labels": tokens.clone()}
    hidden = (torch.arange(LENGTH) + index) % 4 == 0
    return {
        "input_ids": tokens.masked_fill(hidden, 3),
        "attention_mask": torch.ones_like(tokens),
        "labels": tokens.masked_fill(~hidden, -100),
    }


class Elements:
    """Elements as tokenizers of transformers return them: mappings that are no dicts."""

    def __init__(self, masked: bool) -> None:
        self.masked = masked

    def __iter__(self) -> Iterator[Any]:
        index = 0
        while True:
            yield transformers.BatchEncoding(element(index, self.masked))
            index += 1


def collate(elements: list[Any]) -> Any:
    names = elements[0].keys()
    return transformers.BatchEncoding({name: torch.stack([one[name] for one in elements]) for name in names})


def test_tying_after_the_manager_has_started_is_followed() -> None:
    """tie_weights() of ALBERT moves a bias to other memory, where no runner would see what an optimizer writes."""
    sizes = {"embedding_size": 16, "hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": LENGTH}
    config = transformers.AlbertConfig(vocab_size=VOCABULARY, num_hidden_layers=2, num_attention_heads=2, **sizes)
    model = transformers.AlbertForMaskedLM(config)
    model.tie_weights()  # Harmless before a manager has the model.
    options = {"nprocs": 1, "batch_size_per_device": 2, "runners__threads": 1}
    with accelmgr.Manager(model, Elements(True), collate_fn=collate, **options) as manager:
        assert manager.step().ok
        model.tie_weights()
        with torch.no_grad():
            model.predictions.bias.add_(torch.linspace(0, 1, VOCABULARY))
        batch = collate([transformers.BatchEncoding(element(index, True)) for index in (2, 3)])
        loss = copy.deepcopy(model)(**batch).loss.item()
        assert manager.step().loss == pytest.approx(loss, rel=1e-5)
