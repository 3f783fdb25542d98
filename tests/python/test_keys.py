"""Checks that every key passed in Python has an effect or is an error; an unread key of a file gets a warning."""

from __future__ import annotations

import logging
import pathlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from gate import Count
from torch import nn

import accelmgr


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.weight).mean()


ROWS = [torch.tensor([float(i), 1.0]) for i in range(16)]


@pytest.mark.parametrize(
    ("options", "key", "message"),
    [
        ({"model__kind": "mlp"}, "model.kind", "is 'mlp', but what was passed is 'gpt'"),
        ({"collate_fn": torch.stack}, "collate_fn", "no effect with a built-in model or dataset"),
        ({"max_element_bytes": 100}, "max_element_bytes", "no effect with a built-in dataset"),
    ],
)
def test_a_key_that_the_built_in_one_does_not_read_is_an_error(options: dict[str, Any], key: str, message: str) -> None:
    with pytest.raises(accelmgr.ConfigError, match=message) as caught:
        accelmgr.Manager("gpt", "text", nprocs=1, start=False, config={"data": {"files": [__file__]}}, **options)
    assert caught.value.key == key


def test_keys_of_a_file_that_serves_other_programs_too_are_a_warning(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("nprocs: 1\nmodel: {kind: gpt, gpt: {layers: 1}}\noptimizer: {kind: sgd}\nlaunch: {nprocs: 2}\n")
    monkeypatch.setenv("ACCELMGR_TRAIN__STEPS", "7")
    with caplog.at_level(logging.WARNING, logger="accelmgr"):
        accelmgr.Manager(Line(), Count(), config=file, start=False)
    assert [record.getMessage() for record in caplog.records] == [
        "the configuration sets keys that a Manager does not read: model.gpt.layers, optimizer.kind, train.steps"
    ]


@pytest.mark.parametrize(
    ("options", "key", "said"),
    [
        ({"nprocs": 0}, "nprocs", "Manager(nprocs=0): nprocs is '0'; it must be a whole number from 1 to 24"),
        ({"runners__on_loss": "x"}, "runners.on_loss", "Manager(runners__on_loss='x'): runners.on_loss is 'x'"),
        ({"runners": {"on_loss": "x"}}, "runners.on_loss", "Manager(runners={'on_loss': 'x'}): runners.on_loss is 'x'"),
        ({"config": {"nprocs": 0}}, "nprocs", "Manager(config={'nprocs': 0}): nprocs is '0'"),
        ({"batch_size": 2}, "batch_size", "unknown key 'batch_size'; did you mean 'batch_size_per_device'?"),
        ({"nprocs": 1, "runners": {"min_runners": 2}}, "runners.min_runners", "Manager(runners={'min_runners': 2})"),
        ({"config": {"optimizer": {"kind": "sgd"}}}, "optimizer.kind", "optimizer.kind has no effect on a Manager"),
        ({"data": {"files": ["a", "b"]}}, "data.files", "the dataset is the program's own"),
        ({"model__kind": "gpt"}, "model.kind", "is 'gpt', but what was passed is 'Line'"),
        ({"data__kind": "text"}, "data.kind", "is 'text', but what was passed is 'Count'"),
    ],
)
def test_what_is_wrong_in_a_call_is_named_as_it_was_typed(options: dict[str, Any], key: str, said: str) -> None:
    with pytest.raises(accelmgr.ConfigError) as caught:
        accelmgr.Manager(Line(), Count(), start=False, **options)
    assert said in str(caught.value) and "--set" not in str(caught.value)
    assert caught.value.key == key


# data.epochs


class Indexed:
    def __init__(self, rows: list[torch.Tensor]) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._rows[index]


class Once:
    """A dataset that can be iterated only once."""

    def __init__(self) -> None:
        self.left = list(ROWS)

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.left:
            yield self.left.pop(0)


def sums(manager: accelmgr.Manager, model: Line) -> list[float]:
    """The sum of the numbers of each step's elements, until the data ends."""
    found = []
    for result in manager.steps(accumulate=False):
        assert model.weight.grad is not None
        found.append(model.weight.grad[0].item() * 2 * result.samples)
    return found


class Locked(Indexed):
    """Cannot be pickled, so the host reads it."""

    def __init__(self, rows: list[torch.Tensor]) -> None:
        super().__init__(rows)
        self.lock = threading.Lock()


class LockedIterable:
    """The same of a dataset that can be iterated again."""

    def __init__(self, rows: list[torch.Tensor]) -> None:
        self._rows, self.lock = rows, threading.Lock()

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self._rows)


@pytest.mark.parametrize("kind", [list, Indexed, Locked, LockedIterable])
@pytest.mark.parametrize("drop_last", [True, False])
def test_epochs_end_where_those_of_a_loader_end(kind: Any, drop_last: bool) -> None:
    rows = kind(ROWS[:10])
    loader = torch.utils.data.DataLoader(ROWS[:10], batch_size=4, drop_last=drop_last)
    expected = [batch[:, 0].sum().item() for _ in range(3) for batch in loader]
    assert len(expected) == (6 if drop_last else 9)
    model = Line()
    data = {"epochs": 3, "drop_last": drop_last}
    with accelmgr.Manager(model, rows, nprocs=2, batch_size_per_device=2, data=data, loss_scaling="samples") as manager:
        assert sums(manager, model) == pytest.approx(expected)
        assert manager.statistics().samples == (24 if drop_last else 30)
        assert manager.step().status == "data_end"


def test_without_an_end_where_epochs_is_0_and_once_where_nothing_says_so() -> None:
    model = Line()
    with accelmgr.Manager(model, ROWS, nprocs=1, batch_size_per_device=16, data={"epochs": 0}) as manager:
        assert [result.samples for result in manager.steps(4)] == [16] * 4
    with accelmgr.Manager(Line(), ROWS, nprocs=1, batch_size_per_device=16) as manager:
        assert [result.samples for result in manager.steps(4)] == [16]


def endless() -> Iterator[torch.Tensor]:
    yield from ROWS


class NoLength:
    def __getitem__(self, index: int) -> torch.Tensor:
        return ROWS[index]


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (endless(), "is a generator, which can be iterated once; pass a list or another iterable"),
        (iter(ROWS), "is a list_iterator, which can be iterated once"),
        (NoLength(), "a NoLength, has no length"),
    ],
    ids=["generator", "iterator", "no_length"],
)
def test_what_cannot_be_read_again_is_refused(dataset: Any, message: str) -> None:
    with pytest.raises(accelmgr.ConfigError, match=f"data.epochs is 3, but .*{message}") as caught:
        accelmgr.Manager(Line(), dataset, nprocs=1, data={"epochs": 3})
    assert caught.value.key == "data.epochs"


def test_what_gives_nothing_the_second_time_is_an_error_of_the_step() -> None:
    with accelmgr.Manager(Line(), Once(), nprocs=1, batch_size_per_device=16, data={"epochs": 2}) as manager:
        assert manager.step().ok
        result = manager.step()
        assert (result.status, result.error_type) == ("data_end", "DataError")
        assert "gave no element when it was iterated again, in epoch 2" in result.error


# A DataLoader
