"""A DataLoader as it stands: with one runner plain PyTorch's bits, with several each batch divided among them."""

from __future__ import annotations

import os
import pathlib
import random
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from saving import save
from torch.utils.data import DataLoader, Dataset, IterableDataset, WeightedRandomSampler

import accelmgr


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)

    def forward(self, x: torch.Tensor, scale: Any = 1.0) -> dict[str, torch.Tensor]:
        loss = (self.layer(x).squeeze(-1) * scale).square().mean()
        return {"loss": loss, "sum": x.double().sum()}


class Augmented(Dataset[Any]):
    """Draws from all generators."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Any:
        drawn = [random.random(), float(numpy.random.rand())]
        return torch.tensor([float(index), *drawn]) + torch.rand(3)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        for index in range(10):
            yield {"x": torch.tensor([float(index), 1.0, 2.0]), "scale": float(index % 3)}


def noisy(rows: list[torch.Tensor]) -> dict[str, Any]:
    return {"x": torch.stack(rows) + torch.rand(len(rows), 3), "scale": torch.ones(len(rows))}


ROWS = torch.arange(30.0).reshape(10, 3) / 30

LOADERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "in_order": lambda: DataLoader(list(ROWS), batch_size=4),
    "drop_last": lambda: DataLoader(list(ROWS), batch_size=4, drop_last=True),
    "shuffled": lambda: DataLoader(torch.utils.data.TensorDataset(ROWS, ROWS.sum(1)), batch_size=4, shuffle=True),
    "own_generator": lambda: DataLoader(
        list(ROWS), batch_size=5, shuffle=True, generator=torch.Generator().manual_seed(3)
    ),
    "augmented": lambda: DataLoader(Augmented(), batch_size=4, shuffle=True),
    "workers": lambda: DataLoader(Augmented(), batch_size=4, shuffle=True, num_workers=2),
    "persistent_workers": lambda: DataLoader(Augmented(), batch_size=4, num_workers=2, persistent_workers=True),
    "collate_fn_that_draws": lambda: DataLoader(list(ROWS), batch_size=4, collate_fn=noisy),
    "sampler": lambda: DataLoader(list(ROWS), batch_size=4, sampler=WeightedRandomSampler([1.0] * 10, 14)),
    "batch_sampler": lambda: DataLoader(list(ROWS), batch_sampler=[[0, 1, 2], [3], [4, 5, 6, 7, 8], [9, 0]]),
    "stream": lambda: DataLoader(Stream(), batch_size=4),
}


def arguments(batch: Any) -> tuple[list[Any], dict[str, Any]]:
    if isinstance(batch, dict):
        return [], batch
    return list(batch) if isinstance(batch, (list, tuple)) else [batch], {}


def seed() -> None:
    random.seed(5)
    numpy.random.seed(5)
    torch.manual_seed(5)


def plain(make: Callable[[], DataLoader[Any]], epochs: int) -> tuple[list[float], torch.Tensor]:
    seed()
    model, losses = Net(), []
    loader = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(epochs):
        for batch in loader:
            positional, named = arguments(batch)
            optimizer.zero_grad()
            loss = model(*positional, **named)["loss"]
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses, model.layer.weight.detach().clone()


def trained(make: Callable[[], DataLoader[Any]], epochs: int, **options: Any) -> tuple[list[float], torch.Tensor]:
    seed()
    model, losses = Net(), []
    loader = make()
    options = {"data": {"epochs": epochs}, "runners__threads": torch.get_num_threads()} | options
    with accelmgr.Manager(model, loader, **options) as manager:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for result in manager.steps():
            optimizer.step()
            optimizer.zero_grad()
            losses.append(result.loss)
    return losses, model.layer.weight.detach().clone()


@pytest.mark.parametrize("kind", LOADERS)
def test_with_one_runner_a_loader_gives_plain_pytorchs_bits_epoch_by_epoch(kind: str) -> None:
    losses, weight = plain(LOADERS[kind], 2)
    found, trained_weight = trained(LOADERS[kind], 2, nprocs=1)
    assert found == losses
    assert torch.equal(trained_weight, weight)


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("kind", ["in_order", "shuffled", "stream"])
def test_several_runners_divide_each_batch_and_a_last_one_is_the_mean_of_its_samples(
    kind: str, micro_batches: int
) -> None:
    losses, weight = plain(LOADERS[kind], 2)
    assert len(losses) == 6
    found, trained_weight = trained(LOADERS[kind], 2, nprocs=2, grad_accumulation_steps=micro_batches)
    assert found == pytest.approx(losses, rel=1e-5)
    torch.testing.assert_close(trained_weight, weight)


class Sums(Net):
    def forward(self, x: torch.Tensor, scale: Any = 1.0) -> dict[str, torch.Tensor]:
        # A digit for each element, in its order: runners' numbers are averaged by their samples.
        order = torch.arange(len(x) - 1, -1, -1, dtype=torch.float64)
        return {"loss": self.layer(x).mean(), "digits": (x[:, 0].double() * 10**order).sum()}


def test_each_runner_has_neighbours_as_evenly_as_possible() -> None:
    rows = [torch.tensor([float(index), 0.0, 0.0]) for index in range(9)]
    with accelmgr.Manager(Sums(), DataLoader(rows, batch_size=6), nprocs=2, loss_scaling="runners") as manager:
        assert [(result.samples, result.scalars["digits"]) for result in manager.steps()] == [
            (6, (12 + 345) / 2),
            (3, (67 + 8) / 2),
        ]


def test_a_loader_that_cannot_be_pickled_or_collates_itself_is_read_all_the_same() -> None:
    class Locked(Augmented):
        def __init__(self) -> None:
            self.lock = threading.Lock()

        def __getitem__(self, index: int) -> Any:
            with self.lock:
                return torch.full((3,), float(index))

    for nprocs in (1, 2):
        make = lambda: DataLoader(Locked(), batch_size=4)  # noqa: E731
        losses, _ = plain(make, 2)
        assert trained(make, 2, nprocs=nprocs, start_method="spawn")[0] == pytest.approx(losses, rel=1e-5)


def test_what_does_not_fit_is_refused_in_words() -> None:
    loader = DataLoader(list(ROWS), batch_size=5)
    sampler = torch.utils.data.BatchSampler(torch.utils.data.SequentialSampler(ROWS), 4, False)
    own = DataLoader(list(ROWS), batch_sampler=iter([[0, 1]]))
    for given, options, key, words in (
        (loader, {"nprocs": 2}, "batch_size_per_device", "cannot be divided evenly among 2 runners"),
        (loader, {"nprocs": 1, "batch_size_per_device": 4}, "batch_size_per_device", "gives each of 1 runners 5"),
        (loader, {"nprocs": 1, "data__drop_last": True}, "data.drop_last", "its own drop_last counts"),
        (loader, {"device": "auto"}, "nprocs", "pass nprocs"),
        (own, {"nprocs": 1}, "batch_size_per_device", "does not say how large batches are"),
    ):
        with pytest.raises(accelmgr.ConfigError, match=words) as caught:
            accelmgr.Manager(Net(), given, start=False, **options)
        assert caught.value.key == key
    assert accelmgr.Manager(Net(), DataLoader(list(ROWS), batch_sampler=sampler), nprocs=2, start=False) is not None


def test_a_loader_that_leaves_everything_out_is_refused() -> None:
    with pytest.raises(accelmgr.DataError, match=r"gives no batch.*batch_size=16, drop_last=True.*drop_last=False"):
        accelmgr.Manager(Net(), DataLoader(list(ROWS), batch_size=16, drop_last=True), nprocs=1)


def test_a_batch_that_is_larger_than_was_said_is_an_error() -> None:
    loader = DataLoader(list(ROWS), batch_sampler=iter([[0, 1], [2, 3, 4, 5]]))
    with accelmgr.Manager(Net(), loader, nprocs=1, batch_size_per_device=3) as manager:
        assert manager.step().samples == 2
        with pytest.raises(accelmgr.DataError, match="a batch of 4 elements, but a step takes 3"):
            manager.step().raise_for_status()


@pytest.mark.parametrize(("kind", "nprocs"), [("own_generator", 1), ("augmented", 2), ("workers", 2)])
def test_a_loader_goes_on_in_its_second_epoch_after_a_kill_and_after_a_checkpoint(
    kind: str, nprocs: int, tmp_path: pathlib.Path
) -> None:
    def make() -> DataLoader[Any]:
        own = torch.Generator().manual_seed(3)
        data: Any = list(ROWS) if kind == "own_generator" else Augmented()
        generator = own if kind == "own_generator" else None
        return DataLoader(data, 4, shuffle=True, generator=generator, num_workers=2 * (kind == "workers"))

    def sums(resume: str, kill_at: int, save_at: int) -> list[float]:
        seed()
        checkpoint = {"directory": str(tmp_path), "resume": resume}
        with accelmgr.Manager(Net(), make(), nprocs=nprocs, data={"epochs": 3}, checkpoint=checkpoint) as manager:
            found = []
            while result := manager.step():
                found.append(result.scalars["sum"])
                if len(found) == save_at:
                    save(manager)
                    break
                if len(found) == kill_at:
                    os.kill(manager.statistics().manager_pid, signal.SIGKILL)
                    while result := manager.step():  # Runners go on with what the queues hold.
                        found.append(result.scalars["sum"])
                    if result.counted:
                        found.append(result.scalars["sum"])
                    manager.recover()
            else:
                assert not result.error_type, result.error
        return found

    whole = sums("", 0, 0)
    assert len(whole) == 9
    assert sums("", 4, 0) == whole
    first = sums("", 0, 5)
    assert first + sums("latest", 0, 0) == whole


class Epochs(Dataset[torch.Tensor]):
    def __init__(self) -> None:
        self.epoch = 0

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((3,), float(self.epoch))


def test_a_loader_whose_dataset_is_changed_is_refused_and_does_not_go_on_with_old_elements() -> None:
    dataset = Epochs()
    model = torch.nn.Linear(3, 1)
    loader = DataLoader(dataset, batch_size=4)
    with accelmgr.Manager(model, loader, loss=lambda outputs, batch: outputs.mean(), nprocs=1) as manager:
        assert manager.step().ok
        dataset.epoch = 1
        with pytest.raises(accelmgr.DataError, match=r"'dataset' of the DataLoader was changed \(set_epoch"):
            manager.step()
