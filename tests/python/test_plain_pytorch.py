"""Whole scripts in the styles of different people: each runs with plain PyTorch in one process, and with a manager.

A script gets a model and a function that computes a step: forward and backward. What it does to the model, to `.grad`
and to torch between steps must make the same difference in both.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable
from typing import Any

import loops
import numpy
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from loops import Compute
from torch import nn

pytestmark = pytest.mark.usefixtures("one_thread")

BATCH = 4
STEPS = 6


class Config:
    def __init__(self) -> None:
        self.scale = 1.0
        self.schedule = [1.0, {"weight": 1.0}]


@dataclasses.dataclass(slots=True)
class Slotted:
    factor: float = 1.0
    parts: list[float] = dataclasses.field(default_factory=lambda: [1.0])


class Net(nn.Module):
    """Two heads, one of which a step may not use; attributes that forward() reads."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(0.0))
        self.norm = nn.BatchNorm1d(6)
        self.heads = nn.ModuleList(nn.Linear(6, 1) for _ in range(2))
        self.temperature = 1.0
        self.which = 0
        self.config = Config()
        self.mask = torch.ones(6)
        self.attack = 0.0
        self.slotted = Slotted()
        self.array = numpy.ones(6, dtype=numpy.float32)
        self.table = [1.0] * 5000
        self.register_buffer("shift", torch.zeros(6))

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        features = self.norm(self.body(x)) * self.mask + self.shift
        features = features * torch.from_numpy(self.array)
        weight = self.config.scale * self.config.schedule[0] * self.config.schedule[1]["weight"]
        weight *= self.slotted.factor * self.slotted.parts[0] * self.table[4000]
        return (self.heads[self.which](features)[:, 0] * self.temperature - y).square().mean() * weight

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if self.attack:
            probe = x.clone().requires_grad_()
            self.loss(probe, y).backward()
            x = (x + self.attack * probe.grad.sign()).detach()
            self.zero_grad()
        return self.loss(x, y)


def rows(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [(torch.randn(4, generator=generator), torch.randn((), generator=generator)) for _ in range(count)]


Script = Callable[[Net, Compute], None]


def sgd(model: Net) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def loop(model: Net, compute: Compute, change: Callable[[int], None], optimizer: torch.optim.Optimizer) -> None:
    for step in range(STEPS):
        change(step)
        optimizer.zero_grad()
        compute()
        optimizer.step()


def clips_and_schedules(model: Net, compute: Compute) -> None:
    optimizer = sgd(model)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=STEPS + 1)
    for _ in range(STEPS):
        compute()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=False)


def hooks_come_and_go(model: Net, compute: Compute) -> None:
    handles: list[Any] = []

    def change(step: int) -> None:
        if step == 1:
            handles.append(model.body[0].register_forward_hook(lambda module, inputs, output: output * 1.5))
        if step == 2:
            handles.append(model.heads[0].weight.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1)))
        if step == 4:
            handles.pop(0).remove()
        if step == 5:
            handles.pop(0).remove()

    loop(model, compute, change, sgd(model))


def modules_change_places(model: Net, compute: Compute) -> None:
    def change(step: int) -> None:
        model.body[1], model.body[2] = model.body[2], model.body[1]
        model.body[step % 2 + 1].note = step

    model.body[2] = nn.Sigmoid()
    loop(model, compute, change, sgd(model))


def two_optimizers(model: Net, compute: Compute) -> None:
    first, second = sgd(model.body), torch.optim.Adam(model.heads.parameters(), lr=0.05)
    for step in range(STEPS):
        compute()
        (first if step % 2 else second).step()
        (first if step % 2 else second).zero_grad()


def kernels_take_turns(model: Net, compute: Compute) -> None:
    """Those of torch for one tensor, for lists of tensors, and for whole updates; in groups."""
    groups = [{"params": model.body.parameters(), "lr": 0.02}, {"params": model.heads.parameters(), "lr": 0.0}]
    optimizers = [
        torch.optim.AdamW(model.parameters(), foreach=True),
        torch.optim.AdamW(model.parameters(), fused=True),
        torch.optim.Adam(groups, amsgrad=True, weight_decay=0.1),
        torch.optim.RMSprop(model.parameters()),
    ]
    for optimizer in optimizers * 2:
        optimizer.zero_grad()
        compute()
        optimizer.step()


def accumulates(model: Net, compute: Compute) -> None:
    optimizer = sgd(model)
    for step in range(STEPS):
        compute()
        if step % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()


def own_gradients(model: Net, compute: Compute) -> None:
    """Noise, a gradient of the user's own, and one that is dropped; steps add to them at times."""
    optimizer = sgd(model)
    for step in range(STEPS):
        if step % 2 == 0:
            optimizer.zero_grad()
        compute()
        parameters = list(model.parameters())
        parameters[0].grad = parameters[0].grad + 0.01 * step
        parameters[1].grad = None
        parameters[2].grad.mul_(0.5)
        optimizer.step()


def averages_weights(model: Net, compute: Compute) -> None:
    average = torch.optim.swa_utils.AveragedModel(model)
    optimizer = sgd(model)
    for _ in range(STEPS):
        optimizer.zero_grad()
        compute()
        optimizer.step()
        average.update_parameters(model)
    with torch.no_grad():
        for parameter, mean in zip(model.parameters(), average.module.parameters(), strict=True):
            parameter.copy_(mean)


def sharpness_aware(model: Net, compute: Compute) -> None:
    """SAM: the gradient of a step is that at the worst point nearby, for the same batch."""
    optimizer = sgd(model)
    for _ in range(STEPS):
        optimizer.zero_grad()
        compute()
        before = [parameter.detach().clone() for parameter in model.parameters()]
        norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=0.05 / (norm.item() + 1e-12))
        optimizer.zero_grad()
        compute(repeat=True)
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), before, strict=True):
                parameter.copy_(value)
        optimizer.step()


def lbfgs(model: Net, compute: Compute) -> None:
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4, line_search_fn="strong_wolfe")
    for _ in range(STEPS):
        evaluations = itertools.count()

        def closure() -> float:
            optimizer.zero_grad()
            return compute(repeat=next(evaluations) > 0)  # noqa: B023

        optimizer.step(closure)


def grows(model: Net, compute: Compute) -> None:
    optimizer = sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        compute()
        optimizer.step()
        if step % 2:
            model.heads.append(nn.Linear(6, 1))
            model.norm.running_mean.mul_(0.5)
            model.register_buffer(f"buffer{step}", torch.ones(3))
            model.which = len(model.heads) - 1
            optimizer.add_param_group({"params": list(model.heads[-1].parameters())})
            compute.rebind()


CHANGES: dict[str, Callable[[Net, random.Random], object]] = {
    "attribute": lambda model, rng: setattr(model, "temperature", rng.uniform(0.5, 2)),
    "inside an object": lambda model, rng: setattr(model.config, "scale", rng.uniform(0.5, 2)),
    "inside a list": lambda model, rng: model.config.schedule.__setitem__(0, rng.uniform(0.5, 2)),
    "inside a dict in a list": lambda model, rng: model.config.schedule[1].update(weight=rng.uniform(0.5, 2)),
    "another object": lambda model, rng: setattr(model, "config", Config()),
    "slots": lambda model, rng: setattr(model.slotted, "factor", rng.uniform(0.5, 2)),
    "inside slots": lambda model, rng: model.slotted.parts.__setitem__(0, rng.uniform(0.5, 2)),
    "array": lambda model, rng: model.array.__setitem__(rng.randrange(6), rng.uniform(0.5, 2)),
    "long list": lambda model, rng: model.table.__setitem__(4000, rng.uniform(0.5, 2)),
    "tensor": lambda model, rng: model.mask.fill_(rng.uniform(0.5, 2)),
    "another tensor": lambda model, rng: setattr(model, "mask", torch.full((6,), rng.uniform(0.5, 2))),
    "buffer": lambda model, rng: model.shift.fill_(rng.uniform(-1, 1)),
    "another buffer": lambda model, rng: setattr(model, "shift", torch.full((6,), rng.uniform(-1, 1))),
    "module": lambda model, rng: model.body.__setitem__(1, rng.choice([nn.ReLU, nn.Tanh, nn.Sigmoid])()),
    "mode": lambda model, rng: model.train(rng.random() < 0.5),
    "mode of a module": lambda model, rng: model.norm.train(rng.random() < 0.5),
    "attack": lambda model, rng: setattr(model, "attack", rng.choice([0.0, 0.2])),
    "new attribute": lambda model, rng: setattr(model.body[0], f"note{rng.randrange(3)}", rng.random()),
    "hook": lambda model, rng: model.body[0].register_forward_hook(lambda m, i, o: o * 1.1),
    "hook of a parameter": lambda model, rng: model.heads[0].bias.register_hook(lambda g: g * 0.9),
    "frozen": lambda model, rng: model.body.requires_grad_(rng.random() < 0.5),
    "parameter": lambda model, rng: nn.init.constant_(model.heads[0].weight, rng.uniform(0.5, 2)),
    "head": lambda model, rng: setattr(model, "which", rng.randrange(2)),
}


def every_change(model: Net, compute: Compute) -> None:
    rng = random.Random(114)  # What it draws changes something each time.
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    for change in CHANGES.values():
        change(model, rng)
        optimizer.zero_grad()
        compute()
        optimizer.step()
    assert model.attack and model.which and not model.training and model.norm.training
    assert not model.body[0].weight.requires_grad


SCRIPTS: list[Script] = [
    every_change,
    clips_and_schedules,
    hooks_come_and_go,
    modules_change_places,
    two_optimizers,
    accumulates,
    own_gradients,
    kernels_take_turns,
    averages_weights,
    sharpness_aware,
    lbfgs,
    grows,
]


def compare(script: Script) -> None:
    loops.compare(Net, rows(STEPS * BATCH * 4), script, BATCH, "fork")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_a_script_trains_as_with_plain_pytorch(script):
    compare(script)


@settings(
    max_examples=16, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.explicit, Phase.generate]
)
@given(
    plan=st.lists(st.lists(st.sampled_from(sorted(CHANGES)), max_size=3), min_size=4, max_size=STEPS),
    seed=st.integers(0, 10_000),
)
def test_any_changes_between_steps_are_those_of_plain_pytorch(plan, seed):
    def script(model: Net, compute: Compute) -> None:
        rng = random.Random(seed)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
        for changes in plan:
            for change in changes:
                CHANGES[change](model, rng)
            optimizer.zero_grad()
            compute()
            optimizer.step()

    compare(script)
