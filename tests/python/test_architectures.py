"""Checks that architectures of transformers get the gradients of plain autograd."""

from __future__ import annotations

import copy
import importlib.util
import os

import pytest
import torch
from torch import nn

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
if not transformers.is_torch_available():
    _reason = f"transformers {transformers.__version__} does not take torch {torch.__version__}"
    pytest.skip(_reason, allow_module_level=True)

from architectures import architectures  # noqa: E402
from differential import Bundle, Shape, bundle_of, compare  # noqa: E402

if importlib.util.find_spec("peft"):
    import peft


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    return Bundle(dict(architectures()))


def is_parametrized(module: nn.Module) -> bool:
    return any(nn.utils.parametrize.is_parametrized(part) for part in module.modules())


def test_every_architecture(bundle):
    assert len(bundle.cases) >= 80, "of some of each kind; 40 are the least"
    compare(bundle, accumulate=(True, True), step_timeout=100)


def test_some_of_each_kind_with_three_runners_of_a_manager_that_is_a_fork(bundle):
    """Every fifth architecture, and those that are parametrized."""
    cases = list(bundle.cases.items())
    kept = {name: case for i, (name, case) in enumerate(cases) if i % 5 == 0 or is_parametrized(case)}
    compare(Bundle(kept), shape=Shape(runners=3), start_method="fork", accumulate=(True, False), step_timeout=100)


def in_bfloat16(case: nn.Module) -> nn.Module:
    return copy.deepcopy(case).bfloat16()


def with_adapters(case: nn.Module) -> nn.Module:
    """LoRA of float32 beside each linear layer; the rest is bfloat16 and frozen."""
    case = in_bfloat16(case).requires_grad_(False)
    linear = [name for name, module in case.named_modules() if type(module) is nn.Linear]
    torch.manual_seed(0)
    peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=linear, init_lora_weights=False), case)
    for parameter in case.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return case


@pytest.mark.parametrize("change", [in_bfloat16, with_adapters])
def test_architectures_in_bfloat16_while_a_runner_is_killed(bundle, change):
    if change is with_adapters:
        pytest.importorskip("peft", reason="peft is not installed")
    changed, left_out = bundle_of((name, change(case)) for name, case in bundle.cases.items())
    print(*left_out, sep="\n")
    assert len(changed.cases) >= 80
    trained = {parameter.dtype for parameter in changed.parameters() if parameter.requires_grad}
    assert trained == {torch.float32 if change is with_adapters else torch.bfloat16}
    compare(changed, shape=Shape(runners=2), accumulate=(False, False), kills=True, step_timeout=200)
