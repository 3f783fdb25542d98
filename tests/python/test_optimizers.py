"""Checks that optimizers of torch which need one gradient for a step train with a Manager as they do without one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator

import pytest
import torch

import accelmgr

RUNNERS = 2
BATCH = 4
STEPS = 6
Made = tuple[torch.optim.Optimizer, list[torch.optim.lr_scheduler.LRScheduler]]


class Net(torch.nn.Module):
    """Two layers with matrices as weights: Adafactor factors the second moment of matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Linear(8, 16)
        self.head = torch.nn.Linear(16, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": torch.nn.functional.mse_loss(self.head(torch.tanh(self.body(x))), y)}


def element(index: int) -> dict[str, torch.Tensor]:
    x = torch.randn(8, generator=torch.Generator().manual_seed(index))
    return {"x": x, "y": torch.sin(3 * x[:3])}


class Elements:
    """Element i is always the same, so that plain PyTorch can use the elements that the runners had."""

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        index = 0
        while True:
            yield element(index)
            index += 1


def batches(step: int) -> list[dict[str, torch.Tensor]]:
    """The batch of each runner in a step: element i goes to runner i % RUNNERS."""
    first = step * RUNNERS * BATCH
    rows = [[element(first + i) for i in range(rank, RUNNERS * BATCH, RUNNERS)] for rank in range(RUNNERS)]
    return [{name: torch.stack([row[name] for row in own]) for name in ("x", "y")} for own in rows]


def plain_gradient(model: torch.nn.Module, step: int) -> float:
    """Sets `.grad` to the mean of the runners' gradients and returns the mean loss."""
    model.zero_grad(set_to_none=False)
    losses = []
    for batch in batches(step):
        loss = model(**batch)["loss"] / RUNNERS
        loss.backward()
        losses.append(float(loss.item()))
    return sum(losses)


@pytest.fixture(scope="module")
def manager() -> Iterator[accelmgr.Manager]:
    torch.manual_seed(7)
    with accelmgr.Manager(
        Net(), Elements(), nprocs=RUNNERS, batch_size_per_device=BATCH, step_timeout=60, runners__threads=1
    ) as started:
        yield started


@pytest.fixture
def model(manager: accelmgr.Manager) -> torch.nn.Module:
    """The manager's model, with fresh values."""
    own = manager.model
    assert own is not None
    torch.manual_seed(11)
    for parameter, value in zip(own.parameters(), Net().parameters(), strict=True):
        with torch.no_grad():
            parameter.copy_(value)
    manager.zero_grad()
    return own


def schedule_free(make: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]) -> Callable[[Net], Made]:
    return lambda model: (make(list(model.parameters())), [])


def groups(model: Net) -> Made:
    parts = [
        {"params": model.body.parameters(), "lr": 0.02, "weight_decay": 0.1},
        {"params": [model.head.weight], "lr": 0.01},
        {"params": [model.head.bias], "lr": 0.0},
    ]
    return torch.optim.AdamW(parts), []


def schedules(model: Net) -> Made:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, nesterov=True)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)
    return optimizer, [torch.optim.lr_scheduler.SequentialLR(optimizer, [warm_up, cosine], milestones=[2])]


MAKERS: dict[str, Callable[[Net], Made]] = {
    "AdamW": schedule_free(lambda p: torch.optim.AdamW(p, lr=0.02)),
    "AdamW foreach": schedule_free(lambda p: torch.optim.AdamW(p, lr=0.02, foreach=True)),
    "AdamW fused": schedule_free(lambda p: torch.optim.AdamW(p, lr=0.02, fused=True)),
    "Adam amsgrad": schedule_free(lambda p: torch.optim.Adam(p, lr=0.02, amsgrad=True)),
    "SGD": schedule_free(lambda p: torch.optim.SGD(p, lr=0.1)),
    "RMSprop": schedule_free(lambda p: torch.optim.RMSprop(p, lr=0.01)),
    "groups": groups,
    "schedules": schedules,
}
if hasattr(torch.optim, "Adafactor"):  # torch 2.5
    MAKERS["Adafactor"] = schedule_free(lambda p: torch.optim.Adafactor(p, lr=0.02))


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("clip", [None, 0.05], ids=["", "clipped"])
def test_trains_as_without_a_manager(manager: accelmgr.Manager, model: Net, name: str, clip: float | None) -> None:
    plain = copy.deepcopy(model)
    addresses = [(p.data_ptr(), p.grad.data_ptr()) for p in model.parameters() if p.grad is not None]
    before = [p.detach().clone() for p in model.parameters()]
    both = [MAKERS[name](model), MAKERS[name](plain)]
    manager.check_optimizer(both[0][0])
    for _ in range(STEPS):
        result = manager.step()
        loss = plain_gradient(plain, result.step - 1)
        assert result.loss == pytest.approx(loss, rel=1e-6)
        for network, (optimizer, schedulers) in zip((model, plain), both, strict=True):
            if clip is not None:
                assert torch.nn.utils.clip_grad_norm_(network.parameters(), clip) > clip  # The gradient was clipped.
            optimizer.step()
            for scheduler in schedulers:
                scheduler.step()
        manager.zero_grad()
    for (parameter_name, own), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-6, atol=1e-7, msg=f"{parameter_name} after {STEPS} steps")
    assert [(p.data_ptr(), p.grad.data_ptr()) for p in model.parameters() if p.grad is not None] == addresses
    assert any(not torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


class DPOptimizer(torch.optim.Optimizer):
    """As that of opacus: around another one, and not initialized as an Optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.original_optimizer = optimizer

    @property
    def param_groups(self) -> list[dict[str, object]]:
        return self.original_optimizer.param_groups


def sgd(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def over_a_stranger(model: Net) -> torch.optim.Optimizer:
    groups = [{"params": list(model.parameters())}, {"params": [torch.nn.Parameter(torch.ones(5))]}]
    return torch.optim.SGD(groups, lr=0.1)


REFUSED: dict[str, Callable[[Net], object]] = {
    "LBFGS evaluates the loss several times": lambda model: torch.optim.LBFGS(model.parameters()),
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
def test_what_cannot_update_the_parameters_is_refused_with_the_reason(
    manager: accelmgr.Manager, model: Net, reason: str
) -> None:
    with pytest.raises(accelmgr.UsageError, match=reason):
        manager.check_optimizer(REFUSED[reason](model))


def test_an_optimizer_over_parameters_that_have_moved_is_refused() -> None:
    model = Net()
    with accelmgr.Manager(model, Elements(), nprocs=1, runners__threads=1) as manager:
        model.share_memory()
        with pytest.raises(accelmgr.ModelError, match="memory of parameter 'body.weight' was replaced"):
            manager.check_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))


def test_optimizers_that_hold_other_tensors_are_left_alone(manager: accelmgr.Manager, model: Net) -> None:
    """The manager ignores SGD and LBFGS over copies of its parameters. hivemind's offloaded optimizer is such a one."""
    away = copy.deepcopy(model)
    expected = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(network.parameters(), lr=0.1) for network in (away, expected)]
    searching = torch.optim.LBFGS(copy.deepcopy(model).parameters(), max_iter=1)
    for _ in range(3):
        step = manager.step(accumulate=False).step - 1
        plain_gradient(expected, step)
        for parameter, copied in zip(model.parameters(), away.parameters(), strict=True):
            copied.grad = None if parameter.grad is None else parameter.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
        searching.step(lambda: torch.zeros(()))
        with torch.no_grad():
            for parameter, copied in zip(model.parameters(), away.parameters(), strict=True):
                parameter.copy_(copied)
    for own, wanted in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(own, wanted, rtol=1e-6, atol=1e-7)


def test_parameters_of_a_built_in_model_are_what_an_optimizer_takes() -> None:
    config = {"model": {"mlp": {"input_size": 4, "hidden_size": 8, "hidden_layers": 1, "output_size": 2}}}
    with accelmgr.Manager(
        "mlp",
        "synthetic",
        config=config,
        nprocs=1,
        batch_size_per_device=BATCH,
        step_timeout=60,
        runners__threads=1,
    ) as manager:
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
