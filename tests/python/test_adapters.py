"""Adapters of PEFT, attached before the start or later, switched, disabled and merged, against plain PyTorch."""

from __future__ import annotations

import loops
import pytest
import torch
import transformers
from loops import Compute

peft = pytest.importorskip("peft", reason="peft is not installed")
transformers.logging.set_verbosity_error()

STEPS = 3
base_dtype = torch.float32  # Adapters are float32 also on a base of bfloat16.


def gpt2() -> transformers.PreTrainedModel:
    config = transformers.GPT2Config(
        vocab_size=32, n_positions=8, n_embd=8, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    return transformers.GPT2LMHeadModel(config).to(base_dtype)


def lora(**options):
    return peft.LoraConfig(r=2, lora_alpha=4, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True, **options)


def adapted():
    return peft.get_peft_model(gpt2(), lora())


def adapted_with_biases():
    """Something is trained also while the adapters are disabled or merged."""
    return peft.get_peft_model(gpt2(), lora(bias="all"))


def train(model, compute: Compute, optimizer: torch.optim.Optimizer | None = None) -> torch.optim.Optimizer:
    optimizer = optimizer or torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=0.05)
    for _ in range(STEPS):
        optimizer.zero_grad()
        compute()
        optimizer.step()
    return optimizer


def disabled_for_a_while(model, compute: Compute) -> None:
    train(model, compute)
    with model.disable_adapter():
        compute()
    train(model, compute)


def merged_for_a_while(model, compute: Compute) -> None:
    optimizer = train(model, compute)
    model.merge_adapter()
    compute()
    model.unmerge_adapter()
    train(model, compute, optimizer)


def merged_for_good(model, compute: Compute) -> None:
    train(model, compute)
    base = model.merge_and_unload()
    base.requires_grad_(True)
    compute.rebind(base)
    train(base, compute)


def two_adapters(model, compute: Compute) -> None:
    train(model, compute)
    model.add_adapter("other", lora(init_lora_weights="gaussian"))
    model.set_adapter("other")
    compute.rebind()
    train(model, compute)
    model.set_adapter("default")
    train(model, compute)
    model.delete_adapter("other")
    compute.rebind()
    train(model, compute)


def attached_later(model, compute: Compute) -> None:
    train(model, compute)
    wrapped = peft.get_peft_model(model, lora(modules_to_save=["ln_f"]))
    compute.rebind(wrapped)
    train(wrapped, compute)


def of_other_kinds(model, compute: Compute) -> None:
    kinds = {"target_modules": ["c_attn"], "fan_in_fan_out": True}
    ia3 = peft.IA3Config(**kinds, feedforward_modules=[])
    for config in (ia3, peft.LoraConfig(r=2, use_dora=True, **kinds), peft.LoraConfig(r=2, use_rslora=True, **kinds)):
        wrapped = peft.get_peft_model(model, config)
        compute.rebind(wrapped)
        train(wrapped, compute)
        model = wrapped.unload()
        compute.rebind(model)


SCRIPTS = [
    (adapted, train),
    (adapted_with_biases, disabled_for_a_while),
    (adapted_with_biases, merged_for_a_while),
    (adapted, merged_for_good),
    (adapted, two_adapters),
    (gpt2, attached_later),
    (gpt2, of_other_kinds),
]


@pytest.mark.parametrize(
    ("dtype", "make", "script"),
    [(torch.float32, *each) for each in SCRIPTS] + [(torch.bfloat16, *each) for each in SCRIPTS[2:6]],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_adapters_train_as_with_plain_pytorch(dtype, make, script, monkeypatch):
    monkeypatch.setattr(f"{__name__}.base_dtype", dtype)
    generator = torch.Generator().manual_seed(1)
    texts = torch.randint(0, 32, (80, 8), generator=generator)
    with loops.one_thread():
        loops.compare(make, [{"input_ids": text, "labels": text} for text in texts], script, batch=2)
