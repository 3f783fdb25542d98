"""Checks that every key passed in Python has an effect or is an error; an unread key of a file gets a warning."""

from __future__ import annotations

import logging
import pathlib
import re
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

WITHOUT_EFFECT = {
    "optimizer": ({"optimizer": {"learning_rate": 0.1}}, "optimizer.learning_rate", "makes its optimizer itself"),
    "config": ({"config": {"optimizer": {"kind": "sgd"}}}, "optimizer.kind", "makes its optimizer itself"),
    "train": ({"train__steps": 5}, "train.steps", "decides how many steps"),
    "launch": ({"launch": {"nprocs": 2}}, "launch.nprocs", "a manager does not"),
    "checkpoint": (
        {"checkpoint": {"every": 5, "directory": "somewhere"}},
        "checkpoint.every",
        r"calls save_checkpoint\(\)",
    ),
    "seed": ({"data": {"seed": 1}}, "data.seed", "the dataset is the program's own"),
    "files": ({"data": {"files": ["a", "b"]}}, "data.files", "the dataset is the program's own"),
    "model": ({"model__gpt": {"layers": 2}}, "model.gpt.layers", "the model is the program's own"),
    "kind": ({"model__kind": "gpt"}, "model.kind", "is 'gpt', but what was passed is 'Line'"),
    "data_kind": ({"data__kind": "text"}, "data.kind", "is 'text', but what was passed is 'Count'"),
}


@pytest.mark.parametrize("case", WITHOUT_EFFECT)
def test_a_key_without_effect_is_an_error_before_anything_starts(case: str) -> None:
    options, key, message = WITHOUT_EFFECT[case]
    with pytest.raises(accelmgr.ConfigError, match=message) as caught:
        accelmgr.Manager(Line(), Count(), nprocs=1, **options)
    assert caught.value.key == key and key in str(caught.value)


@pytest.mark.parametrize(
    ("options", "key", "message"),
    [
        ({"model__mlp": {"hidden_size": 8}}, "model.mlp.hidden_size", "model.kind gpt does not read it"),
        ({"data": {"elements": 8}}, "data.elements", "data.kind text does not read it"),
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
    ("name", "meant"),
    [
        ("batch_size", "batch_size_per_device"),
        ("num_workers", "nprocs"),
        ("world_size", "nprocs"),
        ("gradient_accumulation_steps", "grad_accumulation_steps"),
        ("epochs", "data.epochs"),
    ],
)
def test_the_names_of_other_libraries_lead_to_the_key(name: str, meant: str) -> None:
    with pytest.raises(accelmgr.ConfigError, match=f"did you mean '{re.escape(meant)}'"):
        accelmgr.Manager(Line(), Count(), **{name: 4})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"nprocs": 0}, "Manager(nprocs=0): nprocs is '0'; it must be a whole number from 1 to 24"),
        ({"step_timeout": "soon"}, "Manager(step_timeout='soon'): step_timeout is 'soon'; it must be a number above 0"),
        ({"runners__on_loss": "x"}, "Manager(runners__on_loss='x'): runners.on_loss is 'x'; it must be fail or"),
        ({"runners": {"on_loss": "x"}}, "Manager(runners={'on_loss': 'x'}): runners.on_loss is 'x'; it must be fail"),
        ({"config": {"nprocs": 0}}, "Manager(config={'nprocs': 0}): nprocs is '0'"),
        ({"nproc": 2}, "Manager(nproc=2): unknown key 'nproc'; did you mean 'nprocs'?"),
        ({"nprocs": 1, "runners": {"min_runners": 2}}, "comes from: Manager(runners={'min_runners': 2})"),
        ({"optimizer": {"kind": "sgd"}}, "Manager(optimizer={'kind': 'sgd'}): optimizer.kind has no effect on a"),
    ],
)
def test_what_is_wrong_in_a_call_is_named_as_it_was_typed(options: dict[str, Any], said: str) -> None:
    with pytest.raises(accelmgr.ConfigError) as caught:
        accelmgr.Manager(Line(), Count(), start=False, **options)
    assert said in str(caught.value) and "--set" not in str(caught.value)


# data.epochs


class Indexed:
    def __init__(self, rows: list[torch.Tensor]) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._rows[index]


class Again:
    """A dataset that can be iterated again. It cannot be pickled, so the host reads it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(ROWS)


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


@pytest.mark.parametrize("dataset", [ROWS, Indexed(ROWS), Again()], ids=["iterable", "indexed", "read_in_the_host"])
def test_a_dataset_is_read_so_many_times(dataset: Any) -> None:
    model = Line()
    with accelmgr.Manager(
        model, dataset, nprocs=2, batch_size_per_device=4, data={"epochs": 3}, runners__threads=1
    ) as manager:
        assert sums(manager, model) == pytest.approx([sum(range(8)), sum(range(8, 16))] * 3)
        assert manager.statistics().samples == 48
        assert manager.step().status == "data_end"


def test_without_an_end_where_epochs_is_0_and_once_where_nothing_says_so() -> None:
    model = Line()
    with accelmgr.Manager(model, ROWS, nprocs=1, batch_size_per_device=16, data={"epochs": 0}) as manager:
        assert [result.samples for result in manager.steps(4)] == [16] * 4
    with accelmgr.Manager(Line(), ROWS, nprocs=1, batch_size_per_device=16) as manager:
        assert [result.samples for result in manager.steps(4)] == [16]


def test_an_epoch_begins_where_a_manager_was_lost() -> None:
    """The manager is lost in the middle of the second pass over a map-style dataset."""
    model = Line()
    with accelmgr.Manager(model, Indexed(ROWS), nprocs=1, batch_size_per_device=4, data__epochs=2) as manager:
        assert [result.samples for result in manager.steps(5)] == [4] * 5
        manager._handle.kill()
        assert manager.step().status == "manager_lost"
        manager.recover()
        assert sums(manager, model) == pytest.approx([sum(range(4, 8)), sum(range(8, 12)), sum(range(12, 16))])


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


class HeldHere(Indexed):
    """Cannot be pickled, so the host reads it."""

    def __init__(self, rows: list[torch.Tensor]) -> None:
        super().__init__(rows)
        self.lock = threading.Lock()


@pytest.mark.parametrize("kind", [list, Indexed, HeldHere])
@pytest.mark.parametrize("drop_last", [True, False])
def test_epochs_end_where_those_of_a_loader_end(kind: Any, drop_last: bool) -> None:
    rows = kind(ROWS[:10])
    loader = torch.utils.data.DataLoader(ROWS[:10], batch_size=4, drop_last=drop_last)
    expected = [batch[:, 0].sum().item() for _ in range(2) for batch in loader]
    assert len(expected) == (4 if drop_last else 6)
    model = Line()
    data = {"epochs": 2, "drop_last": drop_last}
    with accelmgr.Manager(model, rows, nprocs=2, batch_size_per_device=2, data=data, loss_scaling="samples") as manager:
        assert sums(manager, model) == pytest.approx(expected)


def test_a_loader_of_elements_is_a_dataset() -> None:
    model = Line()
    loader = torch.utils.data.DataLoader(ROWS, batch_size=None)
    with accelmgr.Manager(model, loader, nprocs=1, batch_size_per_device=8, data__epochs=2) as manager:
        assert sums(manager, model) == pytest.approx([sum(range(8)), sum(range(8, 16))] * 2)
