"""Tensors that share a parameter's memory go on doing so, wherever the parameter moves."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from torch import nn

import accelmgr

ELEMENTS = [(torch.tensor([1.0, -2.0, 0.5]) * index, torch.tensor([float(index % 3)])) for index in range(1, 60)]


class Net(nn.Module):
    """Its loss reads the global `shadow`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layer = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = (self.layer(x) - y).pow(2).mean()
        return loss if shadow is None else loss + shadow.pow(2).sum() * self.layer.bias.sum()


shadow: torch.Tensor | None = None


@pytest.fixture(autouse=True)
def no_shadow():
    yield
    globals()["shadow"] = None


ALIASES: dict[str, Callable[[nn.Parameter], torch.Tensor]] = {
    "detached": lambda weight: weight.detach(),
    "data": lambda weight: weight.data,
    "flat": lambda weight: weight.detach().view(-1),
    "part": lambda weight: weight.detach()[:, 1:2],
    "transposed": lambda weight: weight.detach().t(),
    "view": lambda weight: weight.view(3),
    "integers": lambda weight: weight.detach().view(torch.int32),
    "parameter": lambda weight: nn.Parameter(weight.detach()),
}


def trained(model: Net, steps: int, **options) -> list[float]:
    losses = []
    with accelmgr.Manager(model, ELEMENTS, nprocs=1, batch_size_per_device=4, **options) as manager:
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for _ in range(steps):
            optimizer.zero_grad()
            losses.append(next(iter(manager.step())))
            optimizer.step()
        assert manager.statistics().replacements == 0
    return losses


def plain(model: Net, steps: int, first: int = 0) -> list[float]:
    losses = []
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for step in range(first, first + steps):
        batch = ELEMENTS[4 * step : 4 * step + 4]
        optimizer.zero_grad()
        loss = model(*(torch.stack([element[part] for element in batch]) for part in range(2)))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("start_method", ["fork", "forkserver"])
@pytest.mark.parametrize("channels_last", [False, True])
def test_they_follow_into_the_session_and_out_of_it(start_method: str, channels_last: bool) -> None:
    model = Net()
    if channels_last:
        model.layer.weight.data = torch.randn(3, 1).t()
    made = {name: make(model.layer.weight) for name, make in ALIASES.items()}
    state = model.state_dict()

    def check() -> None:
        for name, make in ALIASES.items():
            assert torch.equal(made[name], make(model.layer.weight)), name
            assert made[name].data_ptr() == make(model.layer.weight).data_ptr(), name
        assert state["layer.bias"].data_ptr() == model.layer.bias.data_ptr()

    with accelmgr.Manager(model, ELEMENTS, nprocs=2, batch_size_per_device=4, start_method=start_method) as manager:
        check()
        during = model.layer.bias.detach()
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for _ in range(2):
            optimizer.zero_grad()
            manager.step().raise_for_status()
            optimizer.step()
            check()
        made["flat"].mul_(0.5)  # A write by one is a write of the parameter.
        manager.step().raise_for_status()
        manager.rebind()
        check()
        manager.step().raise_for_status()
    check()
    assert during.data_ptr() == model.layer.bias.data_ptr()


@pytest.mark.parametrize("name", [name for name in ALIASES if name != "integers"])
def test_runners_compute_with_them(name: str) -> None:
    global shadow
    model = Net()
    shadow = ALIASES[name](model.layer.weight).detach()
    losses = trained(model, 5)
    model = Net()
    shadow = ALIASES[name](model.layer.weight).detach()
    assert losses == plain(model, 5)


@pytest.mark.parametrize("nprocs", [1, 2])
def test_in_inner_steps_too(nprocs: int) -> None:
    global shadow
    model = Net()
    shadow = model.layer.weight.detach()
    losses = []
    with accelmgr.Manager(model, ELEMENTS, nprocs=nprocs, batch_size_per_device=4 // nprocs) as manager:
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for result in manager.steps(5, optimizer=optimizer):
            losses.append(result.loss)
        assert torch.equal(shadow, model.layer.weight)
    model = Net()
    shadow = model.layer.weight.detach()
    assert losses == pytest.approx(plain(model, 5), rel=1e-5)


def test_runners_keep_running_while_they_change() -> None:
    global shadow
    model = Net()
    shadow = model.layer.weight.detach()
    with accelmgr.Manager(model, ELEMENTS, nprocs=1, batch_size_per_device=4) as manager:
        pid = manager.statistics().manager_pid
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for _ in range(3):
            optimizer.zero_grad()
            manager.step().raise_for_status()
            optimizer.step()
        assert manager.statistics().manager_pid == pid


def test_one_that_is_made_after_the_start_is_known_to_runners() -> None:
    global shadow
    model = Net()
    losses = []
    with accelmgr.Manager(model, ELEMENTS, nprocs=1, batch_size_per_device=4) as manager:
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for step in range(5):
            if step == 2:
                shadow = model.layer.weight.detach()
                manager.refresh()  # A script's global would be seen.
            optimizer.zero_grad()
            losses.append(next(iter(manager.step())))
            optimizer.step()
    model, shadow = Net(), None
    expected = plain(model, 2)
    shadow = model.layer.weight.detach()
    expected += plain(model, 3, first=2)
    assert losses == expected


def test_a_start_that_fails_leaves_them_as_they_were() -> None:
    model = Net()
    alias = model.layer.weight.detach()
    with pytest.raises(accelmgr.Error):
        accelmgr.Manager(model, [], nprocs=1, batch_size_per_device=4)
    assert alias.data_ptr() == model.layer.weight.data_ptr()


def test_a_vector_of_several_parameters_keeps_its_values_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    model = Net()
    vector = nn.utils.parameters_to_vector(model.parameters()).detach()
    nn.utils.vector_to_parameters(vector, model.parameters())
    values = vector.clone()
    with caplog.at_level(logging.WARNING, "accelmgr"):
        trained(model, 2)
    assert torch.equal(vector, values) and not torch.equal(vector[:3], model.layer.weight[0])
    assert "a tensor of this process, [4], shares memory with a parameter, [1, 3]" in caplog.text


@pytest.mark.parametrize("of_parameter", [False, True])
def test_an_array_of_numpy_keeps_its_values_and_its_memory(of_parameter: bool) -> None:
    model = Net()
    model.wide = nn.Linear(400, 400)
    model.wide.requires_grad_(False)
    array = model.wide.weight.numpy() if of_parameter else model.wide.weight.detach().numpy()
    values = array.copy()
    trained(model, 2)
    junk = [torch.full((400, 400), float(index)) for index in range(20)]  # Would be in its place if that were free.
    assert (array == values).all() and len(junk) == 20


def test_without_any_nothing_is_looked_through(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr("gc.get_objects", lambda: calls.append(1) or [])
    trained(Net(), 2)
    model = Net()
    with accelmgr.Manager(model, ELEMENTS, nprocs=1, batch_size_per_device=4) as manager:
        list(manager.steps(2, optimizer=torch.optim.SGD(model.parameters(), 0.01)))
        manager.refresh()
    assert calls == []
