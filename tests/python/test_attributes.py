"""What forward() keeps in attributes of modules, tensors and numbers, is that of plain PyTorch, also after a kill."""

from __future__ import annotations

import copy
import logging
from typing import Any

import launching
import pytest
import test_buffers
import torch
from saving import save
from test_buffers import DATA, SIZE, STEPS, Between, never
from torch import nn

import accelmgr

ONE: dict[str, Any] = {"nprocs": 1, "batch_size_per_device": SIZE, "runners__threads": 1}


class Recurrent(nn.Module):
    """Its state is an attribute that is None at the start, or that forward() makes."""

    def __init__(self, has_state: bool = True) -> None:
        super().__init__()
        self.cell = nn.GRUCell(3, 5)
        if has_state:
            self.h = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.cell(x, getattr(self, "h", None))
        self.h = h.detach()
        return h.square().mean()


class Parts(nn.Module):
    """The state is that of a part, and is written in place."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Recurrent()
        self.part.last = torch.ones(SIZE, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.part(x + self.part.last)
        self.part.last.copy_(x)
        return loss


class Pair(nn.Module):
    """The state is a tuple."""

    def __init__(self, initial: Any = None) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(3, 5)
        self.state = initial

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = self.cell(x, self.state)
        self.state = tuple(each.detach() for each in state)
        return state[0].square().mean()


class Baseline(nn.Module):
    """The attribute is a number before it is a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.baseline: Any = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.layer(x).square().mean()
        advantage = loss - self.baseline
        self.baseline = 0.9 * self.baseline + 0.1 * loss.detach()
        return advantage


class Annealed(nn.Module):
    """Counts its calls, has a factor that begins as another type, and initializes a part of itself once."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.calls = 0
        self.factor: float = 1
        self.last: float | None = None
        self.is_initialized = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_initialized:
            self.mean = x.mean(0)
            self.is_initialized = True
        self.calls += 1
        self.factor *= 0.875
        loss = self.layer(x - self.mean).square().mean() * self.calls + self.factor * self.layer.weight.sum()
        if self.last is not None:
            loss = loss + self.last * self.layer.bias.sum()
        self.last = round(loss.item(), 2)  # What the bits of torch's results do not change.
        return loss


class Noisy(nn.Module):
    """Draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.noise: torch.Generator | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.noise is None:
            self.noise = torch.Generator().manual_seed(3)
        return self.layer(x + torch.randn(x.shape, generator=self.noise)).square().mean()


class Lazy(nn.Module):
    """Makes what is not kept, and remembers that it was made."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.is_made, self.count = False, 0
        self.table: dict[str, float] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_made:
            self.table["factor"] = 2.0
            self.is_made, self.count = True, 1
        return self.layer(x).square().mean() * self.table["factor"] * self.count


class Table(nn.Module):
    """Its tensor has another shape when it is made again, and a number tells how long it is."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.needed, self.known = 2, 0
        self.table: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.needed > self.known:
            self.known = self.needed
            self.table = torch.arange(1.0, 1 + self.known)
        assert self.table is not None
        return self.layer(x).square().mean() * self.table[self.needed - 1]


class Normalized(nn.Module):
    """Where the state has another shape than the batch, it begins anew."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = Recurrent()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.recurrent.h is not None and len(self.recurrent.h) != len(x):
            self.recurrent.h = None
        return self.recurrent(x)


def none_at_times(model: Any, step: int) -> None:
    if step % 3 == 0:
        getattr(model, "part", model).h = None


def zeros_at_times(model: Any, step: int) -> None:
    if step % 3 == 2:
        model.h = torch.zeros(SIZE, 5)


def zeroed_at_times(model: Any, step: int) -> None:
    if step % 3 == 2:
        model.part.h.data.zero_()
        model.part.last.zero_()


def pairs_at_times(model: Any, step: int) -> None:
    if step % 3 == 1:
        model.state = None
    elif step == 2:
        model.state = (model.state[0], torch.ones(SIZE, 5))
    elif step == 6:
        model.state[1].zero_()


def number_at_times(model: Any, step: int) -> None:
    if step % 3 == 0:
        model.baseline = 0.0


def begins_again_at_times(model: Any, step: int) -> None:
    if step % 4 == 2:
        model.calls = 0
        model.last = None
    elif step == 3:
        model.factor = 2.5
    elif step == 5:
        model.is_initialized = False
    elif step == 7:
        model.factor = 1  # The type of the start.


def seeds_at_times(model: Any, step: int) -> None:
    if step % 3 == 1:
        model.noise.manual_seed(step)
    elif step == 6:
        model.noise = None
    elif step == 5:
        torch.rand(1, generator=model.noise)


def needs_more_at_times(model: Any, step: int) -> None:
    if step % 3 == 2:
        model.needed += 1


def gets_a_hook_at_times(model: Any, step: int) -> None:
    if step % 3 == 2:  # Runners begin anew.
        model.register_forward_hook(lambda *_: None)
    if step == 4:
        model.calls = 7


def evaluates(model: Any, step: int) -> None:
    with torch.no_grad():
        if step % 3 == 1:
            model(torch.ones(2, 3))
        elif step % 3 == 2:
            model.recurrent.h = None
            model(torch.ones(SIZE, 3))


def attributes_of(model: nn.Module) -> dict[str, Any]:
    return {
        f"{path}.{name}": value.get_state() if isinstance(value, torch.Generator) else value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, (torch.Tensor, torch.Generator, float, int, tuple)) or value is None
    }


def compare(model: nn.Module, between: Between, kill_before: tuple[int, ...] = (), **options: Any) -> None:
    """With two runners, also what the attributes of modules are."""
    test_buffers.compare(model, between, attributes_of, kill_before, nprocs=2, **options)


@pytest.mark.parametrize("start_method", ["fork", "forkserver"])
def test_a_state_is_reset_and_survives_its_runner(start_method):
    compare(Parts(), none_at_times, kill_before=(4, 6), start_method=start_method)


@pytest.mark.parametrize(
    ("make", "between"),
    [
        (Recurrent, never),
        (lambda: Recurrent(has_state=False), zeros_at_times),
        (Parts, zeroed_at_times),
        (Recurrent, none_at_times),
        (Pair, never),
        (lambda: Pair((torch.ones(SIZE, 5), torch.ones(SIZE, 5))), pairs_at_times),
        (Baseline, number_at_times),
        (Normalized, evaluates),
        (Annealed, begins_again_at_times),
        (Noisy, seeds_at_times),
    ],
)
def test_what_is_kept_is_that_of_plain_pytorch(make, between):
    compare(make(), between, kill_before=(5,))


def test_a_replacement_computes_the_same_bits():
    torch.manual_seed(0)
    made = Parts()
    runs = []
    for killed in (None, 4):
        with accelmgr.Manager(copy.deepcopy(made), DATA, **ONE) as manager:
            losses = []
            for step in range(STEPS):
                if step == killed:
                    launching.kill(manager.statistics().runners[0].pid)
                losses.append(manager.step().loss)
        runs.append(losses)
    assert runs[0] == runs[1]


@pytest.mark.parametrize(
    ("make", "between", "refresh"),
    [
        (Recurrent, none_at_times, "always"),
        (Recurrent, zeros_at_times, "always"),
        (Annealed, begins_again_at_times, "always"),
        (Annealed, gets_a_hook_at_times, "auto"),
        (Noisy, seeds_at_times, "always"),
    ],
)
def test_runners_that_begin_anew_have_the_state_and_what_the_host_has_written(make, between, refresh):
    compare(make(), between, refresh=refresh)


@pytest.mark.parametrize("options", [{"kill_before": (4, 6)}, {"refresh": "always"}], ids=["killed", "forked anew"])
@pytest.mark.parametrize(("make", "between"), [(Lazy, never), (Table, needs_more_at_times)])
def test_a_number_is_lost_with_what_it_tells_of(make, between, options):
    test_buffers.compare(make(), between, lambda model: {}, nprocs=2, **options)


class Large(nn.Module):
    """The state has too many bytes to be compared, and a value at the start."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.h = torch.ones(1 << 15)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.layer(x).square().mean() * self.h.mean()
        self.h = self.h * 0.9 + x.mean()
        return loss


def ones_at_times(model: Any, step: int) -> None:
    if step % 3 == 2:
        model.h = torch.ones(1 << 15)


@pytest.mark.parametrize(("refresh", "kill_before"), [("auto", (5,)), ("always", ())])
def test_a_large_state_has_its_values_and_those_of_the_host(refresh, kill_before):
    compare(Large(), ones_at_times, kill_before, refresh=refresh)


class Counting(nn.Module):
    """Counts in memory that all processes share."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.calls = torch.zeros(()).share_memory_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.layer(x).square().mean()


def test_shared_memory_stays_shared():
    model = Counting()
    with accelmgr.Manager(model, DATA, **ONE) as manager:
        for step in range(4):
            assert manager.step().ok
            assert model.calls == step + 1
        assert "calls" not in manager.buffers()


class Cached(nn.Module):
    """Remembers its last batch, which nothing reads; its shape is that of the batch."""

    def __init__(self, large: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.large = large
        self.shape = 0
        self.last: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = torch.ones(3 << 20, dtype=torch.float64) if self.large else x[: self.shape or 1 + int(x[0, 0] > 0)]
        return self.layer(x).square().mean()


def test_a_memory_of_the_last_batch_may_change_its_shape_and_its_loss_is_told(caplog):
    model = Cached()
    with accelmgr.Manager(model, DATA, **ONE) as manager:
        for step in range(STEPS):
            if step == 4:
                model.last = None
                launching.kill(manager.statistics().runners[0].pid)
            assert manager.step().ok
            with torch.no_grad():
                model(torch.ones(1 + step % 4, 3))  # As an evaluation does.
        model.shape = 3
        assert manager.step().ok
        caplog.clear()
        launching.kill(manager.statistics().runners[0].pid)
        assert manager.step().ok
    assert "without what that had in attribute 'last'" in caplog.text


@pytest.mark.parametrize(
    "make", [lambda: Cached(large=True), lambda: nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1))]
)
def test_a_model_of_which_nothing_is_to_be_kept_starts_once(caplog, make):
    """What the first one leaves behind is too large."""
    caplog.set_level(logging.INFO, "accelmgr")
    with accelmgr.Manager(make(), DATA, loss=lambda outputs, batch: outputs.mean(), **ONE) as manager:
        assert manager.step().ok
        assert "last" not in manager.buffers()
    assert "starts again" not in caplog.text


class Deeper(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x)


def test_a_state_goes_on_after_rebind():
    model, plain = Recurrent(), Recurrent()
    plain.load_state_dict(model.state_dict())
    with accelmgr.Manager(model, DATA, **ONE) as manager:
        for step in range(STEPS):
            if step == 3:
                manager.rebind()
            if step == 5:
                manager.rebind(Deeper(model))  # Where the attribute has another name.
            loss = plain(torch.stack(DATA[step * SIZE : (step + 1) * SIZE])).item()
            assert manager.step().loss == pytest.approx(loss, rel=1e-6), step
            assert manager.statistics().steps == step + 1


def test_a_run_resumes_with_the_state(tmp_path):
    """The model of the second run has none yet, and each runner has its own."""
    plain = [Recurrent() for _ in range(2)]
    options = {**ONE, "nprocs": 2, "checkpoint__directory": str(tmp_path)}
    model = Recurrent()
    for each in plain:
        each.load_state_dict(model.state_dict())
    batches = [torch.stack(DATA[2 * step * SIZE : 2 * (step + 1) * SIZE]) for step in range(STEPS)]
    losses = [sum(each(batch[rank::2]).item() for rank, each in enumerate(plain)) / 2 for batch in batches]
    with accelmgr.Manager(model, DATA, **options) as manager:
        assert [manager.step().loss for _ in range(3)] == pytest.approx(losses[:3], rel=1e-6)
        written = save(manager)
    again = Recurrent()
    with accelmgr.Manager(again, DATA, checkpoint__resume=written.path, **options) as manager:
        assert torch.equal(again.h, model.h)
        assert [manager.step().loss for _ in range(STEPS - 3)] == pytest.approx(losses[3:], rel=1e-6)
        assert manager.statistics().steps == STEPS
