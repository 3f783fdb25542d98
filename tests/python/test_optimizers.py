"""Which optimizers of torch a manager takes, and which it refuses. test_plain_pytorch.py trains with them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator

import pytest
import torch

import accelmgr

ROWS = [torch.randn(8, generator=torch.Generator().manual_seed(index)) for index in range(64)]


def loss_of(outputs: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    return outputs.square().mean()


@pytest.fixture(scope="module")
def manager() -> Iterator[accelmgr.Manager]:
    with accelmgr.Manager(torch.nn.Linear(8, 16), ROWS, loss=loss_of, nprocs=2, runners__threads=1) as started:
        yield started


class DPOptimizer(torch.optim.Optimizer):
    """As that of opacus: around another one, and not initialized as an Optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.original_optimizer = optimizer

    @property
    def param_groups(self) -> list[dict[str, object]]:
        return self.original_optimizer.param_groups


def sgd(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def over_a_stranger(model: torch.nn.Module) -> torch.optim.Optimizer:
    groups = [{"params": list(model.parameters())}, {"params": [torch.nn.Parameter(torch.ones(5))]}]
    return torch.optim.SGD(groups, lr=0.1)


REFUSED: dict[str, Callable[[torch.nn.Module], object]] = {
    "SparseAdam takes sparse gradients.* Use Adam": lambda model: torch.optim.SparseAdam(model.parameters()),
    "DPOptimizer clips the gradient of each sample": lambda model: DPOptimizer(sgd(model.parameters())),
    r"shape \[16, 8\] in group 0 which is not a parameter of this manager": lambda model: sgd(
        copy.deepcopy(model).parameters()
    ),
    r"shape \[5\] in group 1": over_a_stranger,
    "a ConstantLR has no param_groups; pass an optimizer": lambda model: torch.optim.lr_scheduler.ConstantLR(
        sgd(model.parameters())
    ),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_cannot_update_the_parameters_is_refused_with_the_reason(manager: accelmgr.Manager, reason: str) -> None:
    with pytest.raises(accelmgr.UsageError, match=reason):
        manager.check_optimizer(REFUSED[reason](manager.model))


def test_optimizers_that_hold_other_tensors_are_left_alone(manager: accelmgr.Manager) -> None:
    """The manager ignores SGD and LBFGS over copies of its parameters. hivemind's offloaded optimizer is such a one."""
    away = copy.deepcopy(manager.model)
    optimizer, searching = sgd(away.parameters()), torch.optim.LBFGS(copy.deepcopy(away).parameters(), max_iter=1)
    for _ in range(3):
        manager.step(accumulate=False).raise_for_status()
        for parameter, copied in zip(manager.model.parameters(), away.parameters(), strict=True):
            copied.grad = parameter.grad.clone()
        optimizer.step()
        searching.step(lambda: torch.zeros(()))
        for parameter, copied in zip(manager.model.parameters(), away.parameters(), strict=True):
            assert torch.equal(copied, parameter.add(parameter.grad, alpha=-0.1))
            parameter.data.copy_(copied)


def test_parameters_of_a_built_in_model_are_what_an_optimizer_takes() -> None:
    config = {"model": {"mlp": {"input_size": 4, "hidden_size": 8, "hidden_layers": 1, "output_size": 2}}}
    options = {"config": config, "nprocs": 1, "batch_size_per_device": 4, "runners__threads": 1}
    with accelmgr.Manager("mlp", "synthetic", **options) as manager:
        optimizer = torch.optim.SGD(manager.parameters(), lr=0.5)
        manager.check_optimizer(optimizer)
        before = {name: value.clone() for name, value in manager.named_parameters()}
        manager.step().raise_for_status()
        gradients = {name: value.clone() for name, value in manager.named_gradients()}
        assert all(gradient.abs().sum() > 0 for gradient in gradients.values())
        optimizer.step()
        for name, value in manager.named_parameters():
            torch.testing.assert_close(value, before[name] - 0.5 * gradients[name], rtol=1e-6, atol=1e-7)
        optimizer.zero_grad()  # Sets gradients to None; the next step restores them.
        manager.step(accumulate=True).raise_for_status()
        addresses = [tensor.data_ptr() for _, tensor in manager.named_gradients()]
        assert [p.grad.data_ptr() for p in manager.parameters() if p.grad is not None] == addresses
