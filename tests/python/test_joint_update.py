"""Inner steps of several runners on the CPU, which share the parameters: each updates some of them."""

from __future__ import annotations

import gc
import os

import pytest
import torch
from test_inner import OPTIMIZERS, Net, assert_same, in_host, manager_of
from torch import nn

import accelmgr
from accelmgr._updates.inner import Resident
from accelmgr._updates.joint_update import NAME

pytestmark = pytest.mark.usefixtures("one_thread")


def files_of(pid: int | str) -> int:
    found = 0
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try:
            found += NAME in os.readlink(f"/proc/{pid}/fd/{fd}")
        except FileNotFoundError:
            continue
    return found


def updated_here(model: nn.Module) -> list[str]:
    """In a runner: the parameters whose state its optimizer has."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return sorted(names[parameter] for parameter in Resident.present.optimizer.state)


adamw = OPTIMIZERS["adamw"]


def test_each_runner_updates_some_parameters_and_has_their_state_alone():
    model = Net()
    optimizer = adamw(model.parameters())
    with manager_of(model, runners=3) as manager:
        list(manager.steps(6, optimizer=optimizer, clip_grad_norm=0.5))
        of_ranks = [manager.call(updated_here, rank) for rank in range(3)]
        assert all(of_ranks)
        trained = [name for name, _ in model.named_parameters() if not name.startswith("unused")]
        assert sorted(name for names in of_ranks for name in names) == sorted(trained)
        assert_same((model, optimizer), in_host(adamw, 6, 3, clip=0.5, rates=0))


OF_TORCH = sorted(
    (kind for kind in vars(torch.optim).values() if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)),
    key=lambda kind: kind.__name__,
)
REFUSED = (torch.optim.Optimizer, torch.optim.LBFGS, torch.optim.SparseAdam)


@pytest.mark.parametrize("kind", [kind for kind in OF_TORCH if kind not in REFUSED], ids=lambda kind: kind.__name__)
def test_each_optimizer_of_torch_gives_the_bits_that_it_gives_in_the_host(kind):
    def make(parameters) -> torch.optim.Optimizer:
        only = [each for each in parameters if each.ndim == 2 or kind.__name__ != "Muon"]
        return kind(only, 0.01)

    model = Net()
    optimizer = make(model.parameters())
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
    with manager_of(model, runners=3) as manager:
        for result in manager.steps(7, optimizer=optimizer, sync_every=3):
            scheduler.step()
            assert manager.synced_step == result.step // 3 * 3
        assert manager.synced_step == 7
        gc.collect()  # Of other tests: a scheduler and its optimizer refer to each other.
        assert files_of("self") == 1
        assert_same((model, optimizer), in_host(make, 7, 3))


def divide(optimizer: torch.optim.Optimizer, *arguments) -> None:
    """By the norm of all gradients."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = sum(gradient.square().sum() for gradient in gradients)
    for gradient in gradients:
        gradient.div_(norm)


class Divides(torch.optim.SGD):
    def step(self, closure=None):
        divide(self)
        return super().step(closure)


def with_hook(parameters) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(parameters, 0.1)
    optimizer.register_step_pre_hook(divide)
    return optimizer


@pytest.mark.parametrize("make", [lambda p: Divides(p, 0.1), with_hook], ids=["class", "hook"])
def test_an_optimizer_that_may_look_at_all_gradients_has_all_of_them(make):
    model = Net()
    optimizer = make(model.parameters())
    with manager_of(model, runners=2) as manager:
        list(manager.steps(5, optimizer=optimizer))
        assert manager.call(updated_here, 0) == manager.call(updated_here, 1)
        assert_same((model, optimizer), in_host(make, 5, 2, rates=0))


class Moves(Net):
    """Moves its parameters in forward(), by a sum that is exact, and puts them back, or not in some steps."""

    def __init__(self, leaves: bool = False) -> None:
        super().__init__()
        self.leaves = leaves
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(parameter.round(decimals=2).mul_(64).round_().div_(64))

    def forward(self, inputs, targets) -> torch.Tensor:
        weight = self.head.weight
        before = weight.detach().clone()
        weight.data.add_(1.0)
        loss = super().forward(inputs, targets)
        if not self.leaves:
            weight.data.copy_(before)
        return loss


def test_what_a_model_writes_to_its_parameters_is_seen_by_no_other_runner():
    model = Moves()
    optimizer = adamw(model.parameters())
    with manager_of(model, runners=3) as manager:
        list(manager.steps(6, optimizer=optimizer))
    assert_same((model, optimizer), in_host(adamw, 6, 3, rates=0, of=Moves))


def test_a_model_that_does_not_put_a_parameter_back_is_refused_by_its_name():
    model = Moves(leaves=True)
    with manager_of(model, runners=2) as manager, pytest.raises(accelmgr.ModelError, match=r"'head\.weight'"):
        list(manager.steps(2, optimizer=adamw(model.parameters())))


def test_a_team_that_shrinks_has_all_of_the_state_in_each_runner():
    model = Net()
    optimizer = adamw(model.parameters())
    with manager_of(model, runners=3, runners__on_loss="shrink") as manager:
        for result in manager.steps(9, optimizer=optimizer):
            assert result.repeated == 0
            if result.step == 4:
                os.kill(manager.statistics().runners[0].pid, 9)
        assert [runner.rank for runner in manager.statistics().runners] == [1, 2]
        assert manager.synced_step == 9


def test_the_shared_memory_is_there_once_and_goes_with_the_inner_steps():
    model = Net()
    with manager_of(model, runners=2) as manager:
        for _ in range(3):
            optimizer = adamw(model.parameters())
            list(manager.steps(2, optimizer=optimizer))
            gc.collect()
            assert files_of("self") == 1
        manager.step().raise_for_status()
        gc.collect()
        assert files_of("self") == 0
