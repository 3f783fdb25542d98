"""Ten architectures of transformers as one model, whose gradients on a device are compared with those of the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from architectures import KINDS, build, inputs_of
from device_runners import TOLERANCE, distance
from oracle import Oracle
from torch import nn

import accelmgr

ARCHITECTURES = {
    "encoder": ("bert", "albert", "electra"),
    "decoder": ("gpt2", "llama", "gpt_neox"),
    "encoder_decoder": ("t5", "bart"),
    "vision": ("vit", "resnet"),
}


class Many(nn.Module):
    """All of them as one model: their losses are added, and no gradient knows of another."""

    def __init__(self, models: dict[str, nn.Module]) -> None:
        super().__init__()
        self.models = nn.ModuleDict(models)

    def forward(self, **inputs: torch.Tensor) -> dict[str, Any]:
        losses = {}
        for name, model in self.models.items():
            own = {key.removeprefix(f"{name}/"): value for key, value in inputs.items() if key.startswith(f"{name}/")}
            losses[name] = model(**own)["loss"]
        return {"loss": torch.stack(list(losses.values())).sum()} | losses


def check_ten_architectures(start: Callable[..., accelmgr.Manager], steps: int = 2, **options: int) -> None:
    kinds = {name: kind for kind, names in ARCHITECTURES.items() for name in names}
    models = {}
    for name, kind in kinds.items():
        _, common, own = KINDS[kind]
        models[name] = build(name, kind, {**common, **own[name]}).model
    model = Many(models)
    shape = {"nprocs": 2, "batch_size_per_device": 2, **options}
    elements = [
        {
            f"{name}/{key}": value[0]
            for name, kind in kinds.items()
            for key, value in inputs_of(name, kind, index).items()
        }
        for index in range(100)
    ]
    oracle = Oracle(model, elements, **shape)
    with start(model, elements, **shape) as manager:
        for _ in range(steps):
            result = manager.step(accumulate=False)
            result.raise_for_status()
            oracle.zero_grad()
            assert result.loss == pytest.approx(oracle.step(), rel=1e-5)
            names = [name for name, _ in model.named_parameters()]
            ours = dict(zip(names, manager.get_aggregated_gradients(), strict=True))
            theirs = dict(zip(names, oracle.gradients(), strict=True))
            for name in kinds:
                own = [each for each in names if each.startswith(f"models.{name}.")]
                found = distance([ours[each] for each in own], [theirs[each] for each in own])
                assert found <= TOLERANCE, f"{name}: {found:.3g} of the norm"
            with torch.no_grad():
                for (name, one), other in zip(model.named_parameters(), oracle.model.parameters(), strict=True):
                    one.sub_(ours[name].clamp(-1, 1), alpha=1e-2)
                    other.copy_(one)
        assert manager.statistics().replacements == 0
