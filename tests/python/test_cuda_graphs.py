"""Micro-batches as CUDA graphs, against plain PyTorch on the CPU. The graphs are the fakes of
cuda_runners.py, or those of a GPU."""

from __future__ import annotations

import random
import re
from typing import Any

import numpy
import pytest
import torch
from cuda_runners import GPU, ILLEGAL_ADDRESS, LIBRARY, FakeCuda, on_the_fake, start, train
from device_architectures import ARCHITECTURES, check_ten_architectures
from device_runners import (
    IMAGES,
    Dropping,
    Encoder,
    Normalized,
    Switched,
    Vectors,
    assert_close,
    check_buffers,
    made,
    same,
    trained,
    vectors,
)
from oracle import Oracle
from torch import nn
from vectors import Doubles

import accelmgr
from accelmgr._runner.graphs import WARM_UP, NotRecordable, Watch

REFUSED = "micro-batches are not recorded"
GRAPHS = {"runners__cuda_graph": "auto"}


class Counted(Encoder):
    """Counts the calls of forward(), which a graph does not make."""

    def __init__(self, folder: Any) -> None:
        super().__init__()
        self._file = folder / "calls"

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
        with self._file.open("a") as file:
            file.write(".")
        return super().forward(x, y)

    def calls(self) -> int:
        return len(self._file.read_text())


@pytest.mark.parametrize(
    ("micro_batches", "recordings"), [(1, 1), (2, 2), (4, 3)], ids=["alone", "first_and_last", "and_between"]
)
def test_micro_batches_are_recorded_once_and_computed_as_before(tmp_path, micro_batches, recordings):
    torch.manual_seed(1)
    model = Counted(tmp_path)
    shape = {"nprocs": 2, "batch_size_per_device": 2, "grad_accumulation_steps": micro_batches}
    results = train(model, Vectors(), vectors(4), steps=9, **shape, **GRAPHS)
    assert all(result.scalars["twice"] == pytest.approx(2 * result.loss, rel=1e-6) for result in results)
    assert model.calls() == 9 * 2 * micro_batches + 2 * (WARM_UP * micro_batches + recordings), "with the oracle's"


def test_inner_steps_are_recorded_once(tmp_path):
    torch.manual_seed(1)
    model = Counted(tmp_path)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
    with start(model, Vectors(), batch_size_per_device=2, **GRAPHS) as manager:
        for _ in manager.steps(9, optimizer=optimizer):
            scheduler.step()
    assert model.calls() == 2 * (WARM_UP + 1)


def test_without_the_option_nothing_is_recorded(tmp_path):
    model = Counted(tmp_path)
    train(model, Vectors(), vectors(4), steps=6)
    assert model.calls() == 6 * 2 + 6 * 2


class Notes:
    """A collate_fn, which a runner calls for each micro-batch. Notes how many sums over its team it has queued."""

    def __init__(self, folder: Any) -> None:
        self._file = folder / "sums"

    def __call__(self, elements: list[Any]) -> Any:
        if hasattr(FakeCuda, "current"):
            self._file.write_text(str(FakeCuda.current.runtime.fake_nccl_sums()))
        return torch.utils.data.default_collate(elements)


@on_the_fake
def test_runners_in_a_team(tmp_path):
    torch.manual_seed(1)
    model = Counted(tmp_path)
    options = {"nccl": str(LIBRARY), "grad_accumulation_steps": 2, "collate_fn": Notes(tmp_path), **GRAPHS}
    train(model, Vectors(), vectors(4), steps=8, **options)
    assert model.calls() == 8 * 4 + 2 * (WARM_UP * 2 + 2)
    assert int((tmp_path / "sums").read_text()) > WARM_UP + 2


def test_in_double_precision(capfd):
    torch.manual_seed(1)
    model = Switched().double().eval()
    with start(model, Doubles(), **GRAPHS) as manager:
        oracle = Oracle(model, Doubles(), nprocs=2)
        for _ in range(6):
            assert manager.step(accumulate=False).loss == pytest.approx(oracle.step(), rel=1e-12)
            assert_close(manager, oracle, 1e-12)
            oracle.zero_grad()
    assert REFUSED not in capfd.readouterr().err


@pytest.mark.parametrize("autocast", ["bf16", "fp16"])
def test_in_lower_precision_with_a_loss_scale_that_grows(capfd, autocast):
    found = []
    for options in ({}, GRAPHS):
        torch.manual_seed(6)
        half = {"runners__autocast": autocast, "runners__loss_scale__growth_steps": 2}
        with start(Encoder(), Vectors(), nprocs=1, **half, **options) as manager:
            for _ in range(8):
                assert manager.step(accumulate=False).ok
            found.append([gradient.clone() for gradient in manager.get_aggregated_gradients()])
    assert same(found[0], found[1])
    assert REFUSED not in capfd.readouterr().err


def test_buffers_and_what_the_host_does_to_them(capfd):
    check_buffers(start, micro_batches=3, steps=8, **GRAPHS)
    assert REFUSED not in capfd.readouterr().err


def test_modes_and_frozen_parameters_are_recorded_anew(capfd):
    torch.manual_seed(9)
    model = Switched().eval()
    oracle = Oracle(model, vectors(4), nprocs=2)
    with start(model, Vectors(), **GRAPHS) as manager:
        for frozen in (False, True, False):
            for each in (model, oracle.model):
                each.layers[0].requires_grad_(not frozen)
            for _ in range(WARM_UP + 2):
                oracle.zero_grad()
                assert manager.step(accumulate=False).loss == pytest.approx(oracle.step(), rel=1e-5)
                assert_close(manager, oracle)
                assert manager.get_aggregated_gradients()[0].any() != frozen
        model.train()
        losses = {manager.step(accumulate=False).loss for _ in range(WARM_UP + 2)}
        assert len(losses) == WARM_UP + 2
    assert REFUSED not in capfd.readouterr().err


class Obeys:
    """A collate_fn, which a runner calls for each micro-batch."""

    def __init__(self, model: Dropping) -> None:
        self._model = model

    def __call__(self, elements: list[Any]) -> Any:
        self._model.obey()
        if self._model.told("break"):
            FakeCuda.current.runtime.fake_cuda_break_after(0, ILLEGAL_ADDRESS)
        return torch.utils.data.default_collate(elements)


class Quiet(Dropping):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
        noise = 0.1 * torch.rand(2, device=x.device)
        return {"loss": (self.layers(x) * y + noise).square().mean(), "noise": noise.sum()}


@pytest.mark.parametrize(
    "faults", [{5: "die"}, pytest.param({6: "break"}, marks=on_the_fake), {1: "die", 6: "die"}], ids=str
)
def test_a_step_that_is_disturbed_is_replayed_bit_for_bit(tmp_path, faults):
    """Also in a replacement, whose own first steps are no graphs: both draw the same random numbers."""
    options = {"collate_fn": Obeys(Quiet(tmp_path)), "steps": 9, **GRAPHS}
    undisturbed, _ = trained(start, made(Quiet, tmp_path), {}, **options)
    disturbed, results = trained(start, made(Quiet, tmp_path), faults, **options)
    assert same(undisturbed, disturbed)
    assert [result.tries for result in results] == [1 + (step in faults) for step in range(9)]


def padded(elements: list[torch.Tensor]) -> torch.Tensor:
    return nn.utils.rnn.pad_sequence(elements, batch_first=True)


class Table(nn.Module):
    """Keeps a table in an attribute, and makes a larger one where a batch needs it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8))
        self.table = torch.arange(4.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] > len(self.table) or x.device != self.table.device:
            self.table = torch.arange(float(x.shape[1]), device=x.device)
        return (x * self.table[: x.shape[1]] * self.weight[: x.shape[1]]).square().mean()


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_micro_batches_of_another_form_are_computed_beside_graphs(capfd, micro_batches):
    torch.manual_seed(2)
    shape = {"nprocs": 1, "batch_size_per_device": 2, "grad_accumulation_steps": micro_batches}
    texts = [torch.randn(7 if index % 37 == 36 else 4) for index in range(200)]
    train(Table(), texts, iter(texts), steps=20, collate_fn=padded, **shape, **GRAPHS)
    assert REFUSED not in capfd.readouterr().err


def test_micro_batches_that_have_a_form_each_are_not_recorded(capfd):
    texts = [torch.randn(1 + index % 3) for index in range(100)]
    train(Table(), texts, iter(texts), steps=6, nprocs=1, grad_accumulation_steps=6, collate_fn=padded, **GRAPHS)
    assert f"{REFUSED}, each kernel is queued by itself: micro-batches differ" in capfd.readouterr().err


def test_data_that_ends_within_a_step():
    torch.manual_seed(7)
    model = Encoder()
    dataset = [element for element, _ in zip(vectors(4), range(6 * 5 + 3), strict=False)]
    shape = {"nprocs": 1, "batch_size_per_device": 2, "grad_accumulation_steps": 3}
    with start(model, dataset, **shape, data={"drop_last": False}, loss_scaling="samples", **GRAPHS) as manager:
        oracle = Oracle(model, dataset, **shape)
        for _ in range(5):
            oracle.zero_grad()
            assert manager.step(accumulate=False).loss == pytest.approx(oracle.step(), rel=1e-5)
            assert_close(manager, oracle)
        assert manager.step(accumulate=False).samples == 3
        rest = Oracle(model, dataset[30:], batch_size_per_device=3)
        rest.step()
        assert_close(manager, rest)


class Does(Encoder):
    """Something in forward() that a graph would not do again."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self._what = what
        self.calls = 0
        self.tables = [0]
        self.kept = torch.zeros(2)
        self.embedding = nn.Embedding(4, 2, sparse=what == "sparse")
        if what == "replaces":
            self.last.weight.register_post_accumulate_grad_hook(replace)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
        outputs = super().forward(x, y)
        loss = outputs["loss"] + 0 * self.embedding(torch.zeros(1, dtype=torch.int64, device=x.device)).sum()
        match self._what:
            case "reads":
                loss = loss if loss > 0 else -loss
            case "counts":
                self.calls += 1
            case "collects":
                self.tables.append(1)
            case "keeps":
                self.kept = loss.detach()
            case "adds":
                setattr(self, f"attribute_{len(vars(self))}", 1)
            case "number":
                outputs["number"] = 1.0
            case "masks":
                loss = loss + 0 * x[x > 0].sum()
            case "elsewhere":
                torch.ones(2, device="meta")
            case "draws":
                loss = loss + 0 * random.random()
            case "draws from NumPy":
                loss = loss + 0 * numpy.random.rand()
        return outputs | {"loss": loss}


def replace(parameter: torch.Tensor) -> None:
    parameter.grad = parameter.grad.clone()


REASONS = {
    "reads": "waits for values of the device (aten._local_scalar_dense.default, at test_cuda_graphs.py:",
    "masks": "waits for values of the device (aten.index.Tensor, at test_cuda_graphs.py:",
    "counts": "forward() changes the model's attribute 'calls'",
    "collects": "forward() changes the model's attribute 'tables'",
    "keeps": "forward() changes the model's attribute 'kept'",
    "adds": "forward() adds an attribute to the model",
    "number": "the model's output 'number' is a number of Python",
    "elsewhere": "the model computes on meta too (aten.ones.default, at test_cuda_graphs.py:",
    "draws": "the model draws from Python's random numbers",
    "draws from NumPy": "the model draws from NumPy's random numbers",
    "replaces": "the gradient of 'last.weight' is replaced where another micro-batch adds to it",
    "sparse": "the model has a tensor of layout torch.sparse_coo",
}


@pytest.mark.parametrize("what", REASONS)
def test_a_model_that_a_graph_would_not_do_justice_to_is_computed_without_and_told(capfd, what):
    torch.manual_seed(1)
    shape = {"nprocs": 1, "grad_accumulation_steps": 2}
    train(Does(what), Vectors(), vectors(4), steps=WARM_UP + 3, **shape, **GRAPHS)
    told = [line for line in capfd.readouterr().err.splitlines() if REFUSED in line]
    assert len(told) == 1 and REASONS[what] in told[0], told
    assert f"[rank 0 step {WARM_UP + 1}]" in told[0]


class Depends(Normalized):
    """On everything that forward() of a model may use and change."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        self.calls += 1
        drawn = random.random() + numpy.random.rand() + float(torch.rand(()))
        return super().forward(x) | {"loss": super().forward(x)["loss"] * (self.calls + drawn)}


def test_a_model_that_was_refused_goes_on_as_if_nothing_had_been_tried(capfd):
    bits = []
    for options in ({}, GRAPHS):
        torch.manual_seed(3)
        found: list[Any] = []
        with start(Depends(), IMAGES, nprocs=1, batch_size_per_device=5, **options) as manager:
            for _ in range(WARM_UP + 2):
                result = manager.step(accumulate=False)
                result.raise_for_status()
                found += [result.loss, *map(torch.clone, manager.get_aggregated_gradients())]
                found += [buffer for _, buffer in sorted(manager.buffers().items())]
        bits.append(found)
    assert same(bits[0], bits[1])
    assert capfd.readouterr().err.count(REFUSED) == 1


class Synchronizes(Encoder):
    """Does what ends a recording, where no watch of torch's operations sees it. Draws random numbers of the device."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
        outputs = super().forward(x, y)
        if GPU:
            torch.cuda.synchronize()
            return outputs | {"loss": outputs["loss"] + torch.rand((), device=x.device)}
        if not hasattr(FakeCuda, "current"):
            return outputs
        FakeCuda.current.invalidate_recording()
        return outputs | {"loss": outputs["loss"] + FakeCuda.current.draw()}


def test_a_recording_that_is_invalidated_leaves_a_generator_to_draw_from(capfd):
    found = []
    for options in ({}, GRAPHS):
        torch.manual_seed(2)
        with start(Synchronizes(), Vectors(), nprocs=1, **options) as manager:
            results = [manager.step(accumulate=False) for _ in range(WARM_UP + 3)]
            assert all(result.ok for result in results), results[-1]
            found.append([result.loss for result in results])
    assert found[0] == found[1], "a recording that failed drew nothing"
    assert capfd.readouterr().err.count(REFUSED) == 1


def test_an_error_of_the_model_while_it_is_recorded_is_the_model_s(tmp_path):
    torch.manual_seed(1)
    model = Failing(tmp_path)
    with start(model, Vectors(), nprocs=1, **GRAPHS) as manager:
        for _ in range(WARM_UP):
            assert manager.step().ok
        model.tell("raise")
        result = manager.step()
        assert (result.status, result.error_type) == ("runner_lost", "ModelError"), "it is not tried again"
        assert "ArithmeticError: told to raise" in result.error


class Failing(Quiet):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
        if self.told("raise"):
            raise ArithmeticError("told to raise")
        return super().forward(x.expand(2, -1), y.expand(2, -1))


ALL_BUT = ("gpt2", "bart")
"""They look at values: whether the input is padded."""


def test_eight_architectures_of_transformers_are_recorded(capfd, monkeypatch):
    recorded = {kind: tuple(set(names) - set(ALL_BUT)) for kind, names in ARCHITECTURES.items()}
    monkeypatch.setattr("device_architectures.ARCHITECTURES", recorded)
    check_ten_architectures(with_graphs, steps=WARM_UP + 2)
    assert REFUSED not in capfd.readouterr().err


@pytest.mark.parametrize(("name", "kind"), [("gpt2", "decoder"), ("bart", "encoder_decoder")])
def test_the_others_are_told_where_they_look_at_values(capfd, monkeypatch, name, kind):
    monkeypatch.setattr("device_architectures.ARCHITECTURES", {kind: (name,)})
    check_ten_architectures(with_graphs, steps=WARM_UP + 2)
    place = r"aten\._local_scalar_dense\.default, at (modeling|masking)_\w+\.py:\d+"  # Differs by version.
    assert re.search(place, capfd.readouterr().err)


def with_graphs(model: Any, dataset: Any, **options: Any) -> accelmgr.Manager:
    return start(model, dataset, **options, **GRAPHS)


def test_beside_the_device_only_constants_are_computed():
    """The device is torch's meta device here, so that it is not the CPU."""
    weight = torch.ones(3, device="meta")
    with Watch(torch.device("meta")) as watch:
        (weight * torch.tensor(2.0)).sum()
        torch.where(weight > 0, weight, torch.tensor(-1e9))
        assert len(watch.used) == 1
        for call, place in (
            (lambda: torch.ones(2), "aten.ones"),
            (lambda: torch.tensor(2.0).to("meta"), "aten._to_copy"),
            (lambda: weight.add_(torch.tensor(1.0)), "aten.add_"),
            (lambda: torch.tensor(2.0).add_(1.0), "aten.add_"),
            (weight.cpu, "aten._to_copy"),
        ):
            with pytest.raises(NotRecordable, match=f"computes on cpu too .*{place}"):
                call()
