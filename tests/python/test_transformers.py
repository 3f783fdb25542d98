"""Models of transformers, built from a configuration: tied weights, outputs and batches that are mappings."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # Nothing is to be fetched, and nothing asked for.
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

import accelmgr  # noqa: E402

RUNNERS = 2
BATCH = 2
STEPS = 4
LENGTH = 16
VOCABULARY = 256


def albert() -> torch.nn.Module:
    config = transformers.AlbertConfig(
        vocab_size=VOCABULARY,
        embedding_size=16,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=LENGTH,
        hidden_dropout_prob=0.0,  # Runners draw other numbers than the host.
        attention_probs_dropout_prob=0.0,
    )
    model: torch.nn.Module = transformers.AlbertForMaskedLM(config)
    return model


def gpt2() -> torch.nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        n_embd=32,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    model: torch.nn.Module = transformers.GPT2LMHeadModel(config)
    return model


def element(index: int, masked: bool) -> dict[str, torch.Tensor]:
    """Tokens; with `masked`, every fourth is hidden, and only there has it a label."""
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
    """What a tokenizer of transformers gives: a mapping that is no dict."""

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


def plain_gradient(model: torch.nn.Module, step: int, masked: bool) -> float:
    """As the runners have it: element i is of runner i % RUNNERS; the mean of their gradients."""
    model.zero_grad(set_to_none=False)
    mean = 0.0
    first = step * RUNNERS * BATCH
    for rank in range(RUNNERS):
        rows = [element(first + i, masked) for i in range(rank, RUNNERS * BATCH, RUNNERS)]
        loss = model(**{name: torch.stack([row[name] for row in rows]) for name in rows[0]})["loss"] / RUNNERS
        loss.backward()
        mean += loss.item()
    return mean


@pytest.mark.parametrize(
    ("build", "masked", "collate_fn", "ties"),
    [
        (albert, True, collate, {"predictions.decoder.weight", "predictions.decoder.bias"}),
        (gpt2, False, None, {"lm_head.weight"}),
    ],
    ids=["ALBERT", "GPT-2"],
)
def test_trains_as_without_a_manager(build: Any, masked: bool, collate_fn: Any, ties: set[str]) -> None:
    torch.manual_seed(3)
    model = build()
    model.tie_weights()  # Again: no harm before a manager has the model.
    model.train()
    plain = copy.deepcopy(model)
    names = [name for name, _ in model.named_parameters()]
    assert {name for name, _ in model.named_parameters(remove_duplicate=False)} - set(names) == ties
    with accelmgr.Manager(
        model,
        Elements(masked),
        collate_fn=collate_fn,
        nprocs=RUNNERS,
        batch_size_per_device=BATCH,
        step_timeout=60,
        runners__threads=1,
    ) as manager:
        optimizers = [torch.optim.AdamW(network.parameters(), lr=2e-2) for network in (model, plain)]
        manager.check_optimizer(optimizers[0])
        losses = []
        for step in range(STEPS):
            result = manager.step()
            assert result.loss == pytest.approx(plain_gradient(plain, step, masked), rel=1e-6)
            losses.append(result.loss)
            for name, own, expected in zip(names, model.parameters(), plain.parameters(), strict=True):
                # The scale of a gradient is that of its largest element: sums of another order cancel to other zeros.
                scale = expected.grad.abs().max().item()
                torch.testing.assert_close(
                    own.grad, expected.grad, rtol=1e-5, atol=1e-5 * scale, msg=f"gradient of {name} in step {step}"
                )
            for optimizer in optimizers:
                optimizer.step()
            with torch.no_grad():  # Only gradients are compared: Adam makes much of what is next to nothing.
                for own, expected in zip(model.parameters(), plain.parameters(), strict=True):
                    expected.copy_(own)
            manager.zero_grad()
        assert losses[-1] < losses[0] - 0.1
        assert len(manager.get_aggregated_gradients()) == len(names)  # What is tied counts once.
    assert {name for name, _ in model.named_parameters(remove_duplicate=False)} - set(names) == ties


def test_tying_after_the_manager_has_started_is_found() -> None:
    """tie_weights() of ALBERT gives a bias other memory: what an optimizer writes there would reach no runner."""
    model = albert()
    with accelmgr.Manager(
        model, Elements(True), nprocs=1, batch_size_per_device=BATCH, step_timeout=60, runners__threads=1
    ) as manager:
        assert manager.step().ok
        model.tie_weights()  # type: ignore[operator]
        with pytest.raises(accelmgr.ModelError, match="predictions.*bias.*tie_weights"):
            manager.step()
