"""`loss` and `extra` of a manager: what they compute and train is plain PyTorch's, with every start method."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import accelmgr

STEPS, BATCH = 3, 4
METHODS = ("spawn", "forkserver", "fork")
generator = torch.Generator().manual_seed(0)
PAIRS = [(torch.randn(3, generator=generator), torch.tensor(i % 2)) for i in range(STEPS * BATCH)]
NAMED = [{"x": x, "y": y} for x, y in PAIRS]


class Margin(nn.Module):
    """A loss with parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.centres = nn.Parameter(torch.randn(2, 2, generator=torch.Generator().manual_seed(1)))

    def forward(self, features: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(features @ self.centres.T, y)


def made() -> nn.Module:
    torch.manual_seed(2)
    return nn.Linear(3, 2)


def trained(
    model: nn.Module, others: list[torch.Tensor], loss_of: Callable[[Any], torch.Tensor], rows: list[Any]
) -> list[torch.Tensor]:
    """Parameters after training by plain PyTorch, the model's first."""
    parameters = [*model.parameters(), *others]
    optimizer = torch.optim.SGD(parameters, lr=0.5)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(torch.utils.data.default_collate(rows[step * BATCH : (step + 1) * BATCH])).backward()
        optimizer.step()
    return [parameter.detach() for parameter in parameters]


def train(model: nn.Module, rows: list[Any], **options: Any) -> list[torch.Tensor]:
    """The same by a manager."""
    options = {"nprocs": 2, "batch_size_per_device": BATCH // 2, "runners__threads": 1, **options}
    with accelmgr.Manager(model, rows, **options) as manager:
        optimizer = torch.optim.SGD(manager.parameters(), lr=0.5)
        for result in manager.steps(STEPS):
            optimizer.step()
            optimizer.zero_grad()
            assert result.loss > 0
        return [parameter.detach().clone() for parameter in manager.parameters()]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> None:
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def summed(outputs: torch.Tensor, batch: Any) -> dict[str, Any]:
    return {"loss": functional.cross_entropy(outputs, batch["y"]), "right": (outputs.argmax(1) == batch["y"]).sum()}


def of_pair(outputs: torch.Tensor, batch: Any) -> torch.Tensor:
    return functional.cross_entropy(outputs, batch[1])


def of_pair_of(plain: nn.Module, batch: Any) -> torch.Tensor:
    return functional.cross_entropy(plain(batch[0]), batch[1])


class Takes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = made()

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.layer(x) * scale


class Computes(nn.Module):
    """Returns logits and loss, in this order."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = made()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        logits = self.layer(x)
        return logits, functional.cross_entropy(logits, y)


def of_named(plain: nn.Module, batch: Any) -> torch.Tensor:
    return functional.cross_entropy(plain(batch["x"]), batch["y"])


LOSSES: dict[str, tuple[Callable[[], nn.Module], list[Any], Any, Callable[[nn.Module, Any], torch.Tensor]]] = {
    "a criterion": (made, PAIRS, nn.CrossEntropyLoss(), of_pair_of),
    "a function of torch": (made, PAIRS, functional.cross_entropy, of_pair_of),
    "a function": (made, PAIRS, of_pair, of_pair_of),
    "a criterion, of what the model does not take": (Takes, NAMED, nn.CrossEntropyLoss(), of_named),
    "a function, of what the model does not take": (Takes, NAMED, summed, of_named),
    "a place": (Computes, PAIRS, 1, lambda plain, batch: plain(*batch)[1]),
}


@pytest.mark.parametrize("kind", LOSSES)
def test_the_loss_is_that_of_plain_pytorch(kind: str) -> None:
    make, rows, loss, of_plain = LOSSES[kind]
    plain = make()
    want = trained(plain, [], lambda batch: of_plain(plain, batch), rows)
    same(train(make(), rows, loss=loss), want)


@pytest.mark.parametrize("method", METHODS)
def test_a_criterion_with_parameters_is_trained(method: str) -> None:
    plain, margin = made(), Margin()
    want = trained(plain, list(margin.parameters()), lambda batch: margin(plain(batch[0]), batch[1]), PAIRS)
    for model in (made(), made):  # A function may make it.
        same(train(model, PAIRS, loss=Margin(), start_method=method), want)


def with_margin(margin: Margin) -> nn.Module:
    """A model that finds its loss in a closure, as others find theirs in a global variable."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = made()
            self.temperatures = [torch.ones((), requires_grad=True), nn.Parameter(torch.zeros(()))]

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            scale, shift = self.temperatures
            return margin(self.layer(x) * scale + shift, y)

    return Net()


@pytest.mark.parametrize("method", METHODS)
def test_extra_is_trained_where_the_model_refers_to_it(method: str) -> None:
    margin = Margin()
    plain = with_margin(margin)
    want = trained(plain, [*margin.parameters(), *plain.temperatures], lambda batch: plain(*batch), PAIRS)
    margin = Margin()
    model = with_margin(margin)
    scale, shift = model.temperatures
    got = train(model, PAIRS, extra={"margin": margin, "scale": scale, "shift": shift}, start_method=method)
    same(got, want)
    same([margin.centres.detach(), scale.detach(), shift.detach()], got[2:])


def test_extra_has_names_gradients_and_buffers() -> None:
    margin = Margin()
    margin.register_buffer("calls", torch.zeros(()))
    margin.register_forward_pre_hook(lambda module, inputs: module.calls.add_(1) and None)
    model = with_margin(margin)
    with accelmgr.Manager(
        model, PAIRS, nprocs=1, batch_size_per_device=BATCH, extra=[margin, *model.temperatures], runners__threads=1
    ) as manager:
        assert manager.model is model
        names = [name for name, _ in manager.named_parameters()]
        assert sorted(names) == ["extra.0.centres", "extra.1", "extra.2", "layer.bias", "layer.weight"]
        assert list(manager.state_dict()) == list(model.state_dict())
        manager.step().raise_for_status()
        assert margin.calls == 1 and all(tensor.grad is not None for tensor in manager.parameters())
        torch.optim.SGD(margin.parameters(), lr=0.1).step()
        manager.rebind()
        manager.step().raise_for_status()
        assert margin.calls == 2


def test_a_function_that_expects_targets_is_told_what_it_was_given() -> None:
    with accelmgr.Manager(
        made(), PAIRS, nprocs=1, runners__threads=1, loss=lambda outputs, y: (outputs[:, 0] - y.float()).mean()
    ) as manager:
        assert "the loss was given outputs and the whole batch, a tuple; a criterion" in manager.step().error


@pytest.mark.parametrize("rows", [PAIRS, NAMED])
def test_a_model_that_is_given_its_targets_is_told_of_loss(rows: list[Any]) -> None:
    with accelmgr.Manager(made(), rows, nprocs=1, runners__threads=1) as manager:
        assert "pass that too: Manager(model, ..., loss=nn.CrossEntropyLoss())" in manager.step().error


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"loss": 1.5}, "loss is a float; it must be a criterion"),
        ({"loss": True}, "loss is a bool; it must be a criterion"),
        ({"loss": nn.CrossEntropyLoss}, "loss is the class CrossEntropyLoss; it must be a criterion"),
        ({"loss": nn.TripletMarginLoss()}, "called with outputs and targets, which TripletMarginLoss does not take"),
        ({"loss": lambda outputs: outputs}, "called with outputs and batch, which <lambda> does not take"),
        ({"extra": Margin()}, "extra is a Margin; it must be a list or a dict, as in extra=[criterion]"),
        ({"extra": [torch.ones(2)]}, "'extra.0' is of type Tensor, but was computed or requires no gradient"),
        ({"extra": [5]}, "'extra.0' is of type int; extra takes modules"),
        ({"extra": {"weight": Margin()}}, "'weight' is no name that the model leaves free"),
    ],
)
def test_what_cannot_be_a_loss_or_extra_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(accelmgr.ConfigError, match=re.escape(says)):
        accelmgr.Manager(made(), PAIRS, start=False, **options)


@pytest.mark.parametrize(
    ("model", "rows", "says"),
    [
        (Computes(), PAIRS, "of the batch forward() leaves nothing; pass a function that chooses"),
        (made(), NAMED, "the batch has x, y, which forward() does not name; its arguments are: input"),
        (Takes(), [{**row, "z": row["y"]} for row in NAMED], "of the batch forward() leaves y, z; pass a function"),
    ],
)
def test_a_batch_that_has_no_target_for_a_criterion_is_refused(model: nn.Module, rows: list[Any], says: str) -> None:
    with accelmgr.Manager(
        copy.deepcopy(model), rows, loss=nn.CrossEntropyLoss(), nprocs=1, runners__threads=1
    ) as manager:
        assert says in manager.step().error
