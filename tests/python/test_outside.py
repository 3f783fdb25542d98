"""Tensors outside the model: those that a script would train are refused by name; what scripts may do is left alone."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import accelmgr
from accelmgr._model.objective import Objective
from accelmgr._runner import outside
from accelmgr._runner.replica import Replica

X = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """Calls a function of its layer and a batch."""

    def __init__(self, compute: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.compute = compute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.compute(self, x).square().mean()


class Holder:
    def __init__(self, **values: Any) -> None:
        vars(self).update(values)

    def method(self, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return self.inner(model.layer(x))


class Slots:
    __slots__ = ("value",)


GLOBAL = nn.Linear(3, 3)


def leaf() -> torch.Tensor:
    return torch.ones(3, requires_grad=True)


def of_global(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return GLOBAL(model.layer(x))


def of_loss(outputs: torch.Tensor, batch: Any) -> torch.Tensor:
    return GLOBAL(outputs).mean()


def in_closure(value: Any) -> Callable[..., torch.Tensor]:
    return lambda model, x: model.layer(x) * value["deep"][1]


def of_attribute(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model.layer(x) * model.log_alpha


def of_list(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model.layer(x) * model.scales[0] + model.scales[1]


def of_default(model: nn.Module, x: torch.Tensor, scale: torch.Tensor = leaf()) -> torch.Tensor:  # noqa: B008
    return model.layer(x) * scale


def partly(scale: torch.Tensor, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model.layer(x) * scale


def of_slots(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model.layer(x) * model.hidden.value


def with_(model: nn.Module, **attributes: Any) -> nn.Module:
    vars(model).update(attributes)
    return model


def computed(model: nn.Module, times: int = 1, x: torch.Tensor = X) -> list[str]:
    """Computes micro-batches; returns the warnings."""
    replica, said = Replica(model, None), []
    replica._warn = said.append
    for _ in range(times):
        replica._loss([x], 1.0)[0].backward()
    return said


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (Net(of_global), r"GLOBAL.weight \(float32 \[3, 3\]\), GLOBAL.bias \(float32 \[3\]\)"),
        (Net(in_closure({"deep": (0, leaf())})), r"value\['deep'\]\[1\] \(float32 \[3\]\)"),
        (with_(Net(of_attribute), log_alpha=torch.zeros((), requires_grad=True)), r"log_alpha \(float32 \[\]\)"),
        (with_(Net(of_list), scales=[nn.Parameter(torch.ones(3)), leaf()]), r"scales\[0\] .*, scales\[1\] "),
        (Net(of_default), r"\(float32 \[3\]\)"),
        (Net(functools.partial(partly, leaf())), r"\(float32 \[3\]\)"),
        (Net(Holder(inner=nn.Linear(3, 1)).method), r"compute.inner.weight \(float32 \[1, 3\]\)"),
        (Objective(nn.Linear(3, 3), of_loss, ()), r"GLOBAL.weight \(float32 \[3, 3\]\)"),
    ],
)
def test_what_a_script_would_train_is_refused_by_name(model: nn.Module, name: str) -> None:
    with pytest.raises(accelmgr.ModelError, match=f"the loss depends on .*{name}.*extra="):
        computed(model)


def test_what_no_attribute_leads_to_is_refused_in_the_second_micro_batch() -> None:
    slots = Slots()
    slots.value = leaf()
    model = with_(Net(of_slots), hidden=slots)
    computed(model)
    with pytest.raises(accelmgr.ModelError, match=r"the loss depends on a tensor \(float32 \[3\]\)"):
        computed(model, 2)


def test_a_part_of_the_loss_that_comes_later_is_found() -> None:
    model = with_(Net(lambda model, x: model.layer(x) * (model.late if model.late.grad_fn is None else 1)), late=leaf())
    model.late = leaf() * 1
    replica = Replica(model, None)
    for _ in range(3):
        replica._loss([X], 1.0)
    model.late = leaf()
    with pytest.raises(accelmgr.ModelError, match="late"):
        replica._loss([X], 1.0)


# What is no mistake


def adversarial(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    probe = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model.layer(probe).sum(), probe)
    return model.layer(probe + slope.sign())


def penalty(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    between = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model.layer(between).square().sum(), between, create_graph=True)
    return slope


def collocation(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    out = model.layer(model.points).square()
    (slope,) = torch.autograd.grad(out.sum(), model.points, create_graph=True)
    return slope + out


def inner_loop(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    fast = copy.deepcopy(model.layer)
    slopes = torch.autograd.grad(fast(x).square().mean(), list(fast.parameters()), create_graph=True)
    weight, bias = (value - 0.1 * slope for value, slope in zip(fast.parameters(), slopes, strict=True))
    return nn.functional.linear(x, weight, bias) + model.layer(x)


def kept(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    vars(model)["last"] = x.clone().requires_grad_()  # As a model does that shows its input later.
    return model.layer(model.last)


def teacher(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model.teacher[0](model.layer(x))


def target(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        wanted = GLOBAL(x)
    return model.layer(x) - wanted


@pytest.mark.parametrize(
    "model",
    [
        Net(adversarial),
        Net(penalty),
        with_(Net(collocation), points=torch.randn(4, 3, requires_grad=True)),
        Net(inner_loop),
        Net(kept),
        with_(Net(teacher), teacher=[nn.Linear(3, 1).requires_grad_(False)]),
        Net(target),
    ],
    ids=lambda model: model.compute.__name__,
)
def test_what_scripts_may_do_is_left_alone(model: nn.Module) -> None:
    assert computed(model, 4) == []


def test_a_batch_may_require_a_gradient() -> None:
    assert computed(Net(lambda model, x: model.layer(x)), 4, X.clone().requires_grad_()) == []


def test_a_teacher_in_evaluation_mode_is_told_of_once() -> None:
    said = computed(with_(Net(teacher), teacher=[nn.Linear(3, 1).eval()]), 4)
    assert len(said) == 1 and "teacher[0].weight (float32 [1, 3])" in said[0]


def test_the_error_is_that_of_the_step() -> None:
    model = with_(Net(of_attribute), log_alpha=torch.ones((), requires_grad=True))
    with accelmgr.Manager(model, list(X), nprocs=1, runners__threads=1) as manager:
        with pytest.raises(accelmgr.ModelError, match=r"log_alpha \(float32 \[\]\)"):
            manager.step().raise_for_status()
    with accelmgr.Manager(
        model, list(X), nprocs=1, runners__threads=1, extra={"log_alpha": model.log_alpha}
    ) as manager:
        manager.step().raise_for_status()
        assert model.log_alpha.grad is not None


LOOKS: list[int] = []


class CountedReached(outside.Reached):
    def __init__(self, *arguments: Any) -> None:
        LOOKS.append(1)
        super().__init__(*arguments)


@pytest.mark.parametrize("kind, most", [("inner", 6), ("attribute", 20), ("plain", 6)])
def test_few_micro_batches_are_looked_at(monkeypatch, kind: str, most: int) -> None:
    """Also where the host tells the runners something in each step, which adds no tensor to the model."""
    monkeypatch.setattr(outside, "Reached", CountedReached)
    model = Net(lambda model, x: model.layer(x))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with accelmgr.Manager(model, list(X) * 60, nprocs=1, start_method="fork", batch_size_per_device=4) as manager:
        for number in range(60):
            optimizer.param_groups[0]["lr"] = 0.1 / (number + 1)
            if kind == "attribute":
                model.scale = number
            manager.step(optimizer=optimizer if kind == "inner" else None).raise_for_status()
        assert 6 <= manager.call(lambda _: len(LOOKS)) <= most, "at least 1, 2, 4, 8, 16 and 32"


class Phases(Net):
    phase = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.layer(x).square().mean()
        return loss * LATER if self.phase == 1 else loss


LATER = torch.ones((), requires_grad=True)


def test_a_phase_that_begins_late_is_looked_at_once() -> None:
    model = Phases(lambda model, x: x)
    model.phase = 0
    with accelmgr.Manager(model, list(X) * 20, nprocs=1, start_method="fork", batch_size_per_device=4) as manager:
        for _ in range(9):
            manager.step().raise_for_status()
        model.phase = 1
        with pytest.raises(accelmgr.ModelError, match="LATER"):
            manager.step().raise_for_status()


def test_a_buffer_that_requires_a_gradient_is_refused() -> None:
    model = Net(adversarial)
    model.register_buffer("scale", torch.ones(3, requires_grad=True))
    with pytest.raises(accelmgr.ModelError, match="buffer 'scale' requires a gradient, but buffers are not trained"):
        accelmgr.Manager(model, list(X), start=False)
