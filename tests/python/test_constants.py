"""Large buffers lie in the session once while nobody changes them, and are as plain PyTorch's when somebody does."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from safetensors.torch import load_file
from saving import save
from test_buffers import STEPS, compare, every_second, never
from torch import nn

import accelmgr

SIDE = 1024
"""Of a buffer of 4 MiB."""


class Based(nn.Module):
    """`change` acts on the base in each forward pass from the fourth on, `calls` counts them."""

    def __init__(self, change=None, begin: int = 3) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("base", torch.arange(SIDE * SIDE, dtype=torch.float32).view(SIDE, SIDE) / SIDE**2)
        self.register_buffer("mask", torch.ones(SIDE, SIDE), persistent=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.change, self.begin = change, begin

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.change is not None and self.calls >= self.begin:
            self.change(self)
        self.calls += 1
        return (self.weight * x * self.base[-1, -1] * self.mask[0, 0]).square().mean()


def in_place(model: Based) -> None:
    model.base.mul_(0.99)


def in_place_by_little(model: Based) -> None:
    model.base.mul_(1 - 1e-6)


def without_a_trace(model: Based) -> None:
    model.base.data[-1, -1] -= 0.25


def as_an_array(model: Based) -> None:
    model.base.numpy()[-1, -1] -= 0.25


def by_another(model: Based) -> None:
    model.base = model.base * 0.5


def other_memory(model: Based) -> None:
    model.base.data = model.base.data * 0.5


def of_the_mask(model: Based) -> None:
    model.mask.mul_(0.5)


def another_mask(model: Based) -> None:
    model.mask = model.mask * 0.5


WAYS = [in_place, in_place_by_little, without_a_trace, as_an_array, by_another, other_memory, of_the_mask, another_mask]


def session_bytes(model: nn.Module, runners: int) -> int:
    with accelmgr.Manager(model, [torch.ones(3)] * 100, nprocs=runners) as manager:
        assert manager.step().ok
        return manager.statistics().session_bytes


def test_the_session_has_one_of_each():
    one, other = session_bytes(Based(), 1), session_bytes(Based(), 4)
    model = Based()
    small = nn.Parameter(model.base, requires_grad=False)
    del model.base
    model.base = small
    frozen = session_bytes(model, 1)
    assert abs(one - frozen) < 1 << 16, "as much as a frozen parameter"
    assert other - one < model.base.nbytes, "three more runners take less than one more base"


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_nobody_changes_it(start_method):
    compare(Based(), never, start_method=start_method)


def test_runners_that_do_not_see_writes_have_none():
    """The same model is first trained by runners that do."""
    model = Based(in_place)
    for protect in (True, False):
        with accelmgr.Manager(model, [torch.ones(3)] * 100, nprocs=1, runners__protect_parameters=protect) as manager:
            assert manager.step(accumulate=False).ok and manager.step(accumulate=False).ok
    assert model.base[-1, -1] < 1


@pytest.mark.parametrize("change", WAYS)
@pytest.mark.parametrize("begin", [0, 3])
def test_forward_changes_it(change, begin):
    manager = compare(Based(change, begin), never)
    assert manager.statistics().steps == STEPS


@pytest.mark.parametrize("change", WAYS)
def test_the_host_changes_it(change):
    compare(Based(), every_second(change))


def test_others_than_the_one_that_changes_stay():
    model = nn.Sequential(Based(), Based(in_place))
    model.forward = lambda x: model[0](x) + model[1](x)
    with accelmgr.Manager(model, [torch.ones(3)] * 100, nprocs=1) as manager:
        sizes = []
        for _ in range(5):
            assert manager.step(accumulate=False).ok
            sizes.append(manager.statistics().session_bytes)
    assert sizes[2] < sizes[4] < sizes[2] + 5 * SIDE * SIDE * 4


def test_it_is_in_checkpoints_and_comes_back(tmp_path):
    options = {"nprocs": 2, "checkpoint__directory": str(tmp_path), "runners__restart_backoff": 0.01}
    model = Based()
    with accelmgr.Manager(model, [torch.ones(3)] * 100, **options) as manager:
        assert manager.step().ok
        with torch.no_grad():
            model.base.fill_(2.0)
        assert manager.step().ok
        os.kill(manager.statistics().runners[0].pid, signal.SIGKILL)
        assert manager.step(accumulate=False).loss == 4
        assert manager.state_dict()["base"][0, 0] == 2 and "mask" not in manager.state_dict()
        assert manager.buffers()["base"][0, 0] == 2
        manager.save_checkpoint()
    other = Based()
    with accelmgr.Manager(other, [torch.ones(3)] * 100, **options, checkpoint__resume="latest") as manager:
        assert other.base[0, 0] == 2
        assert manager.step(accumulate=False).loss == 4
    changing = Based(in_place, 0)  # Its buffer is an ordinary one from the first step on.
    with accelmgr.Manager(changing, [torch.ones(3)] * 100, **options, checkpoint__resume="latest") as manager:
        assert manager.step(accumulate=False).loss == pytest.approx(4 * 0.99**2)


def test_one_that_is_not_persistent_is_in_no_checkpoint_unless_it_changes(tmp_path):
    options = {"nprocs": 2, "checkpoint__directory": str(tmp_path)}

    def saved(manager):
        written = save(manager)
        names = [*load_file(f"{written.path}/model.safetensors"), *load_file(f"{written.path}/training.safetensors")]
        return [name for name in names if "mask" in name]

    with accelmgr.Manager(Based(), [torch.ones(3)] * 100, **options) as manager:
        assert manager.step(accumulate=False).ok
        assert "mask" not in manager.state_dict() and manager.buffers()["mask"].all()
        assert saved(manager) == []
    # It goes on with the mask of the model.
    changing = Based(of_the_mask, 0)
    with accelmgr.Manager(changing, [torch.ones(3)] * 100, **options, checkpoint__resume="latest") as manager:
        assert manager.step(accumulate=False).loss == pytest.approx(0.25, rel=1e-5)
        assert saved(manager) == ["rank0/buffers/mask", "rank1/buffers/mask"]
    changing = Based(of_the_mask, 0)
    with accelmgr.Manager(changing, [torch.ones(3)] * 100, **options, checkpoint__resume="latest") as manager:
        assert changing.mask[0, 0] == 0.5
        assert manager.step(accumulate=False).loss == pytest.approx(0.25**2, rel=1e-5)
