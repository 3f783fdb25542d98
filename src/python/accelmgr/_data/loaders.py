# Runs in: the host, which takes a loader apart; the process that reads the data, which iterates it; runners.
"""A torch DataLoader that makes batches, as a dataset: each of its batches is a step.

The process that reads the data iterates the loader itself, so samplers, generators, workers and epochs are the
loader's. With one runner the loader collates, too: the runner gets the very batch. With several, elements travel, and
each runner collates its part of the batch.
"""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable, Container, Iterator
from typing import Any, Generic, TypeVar

import torch
from torch.utils.data import DataLoader

from accelmgr._data.reading import END_OF_BATCH, generator_states
from accelmgr._serialization.pickling import dump
from accelmgr.errors import ConfigError, DataError

T = TypeVar("T")

PARTS = ("dataset", "sampler", "batch_sampler", "collate_fn", "worker_init_fn")
"""Attributes of a loader that the script could change while the loader is iterated."""


def own_generators(loader: DataLoader[Any]) -> list[torch.Generator]:
    """The generators from which the loader and its samplers draw, other than torch's global one."""
    places = [loader, loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)]
    found = {id(one): one for place in places if isinstance(one := getattr(place, "generator", None), torch.Generator)}
    return list(found.values())


def makes_batches(dataset: Any) -> bool:
    return isinstance(dataset, DataLoader) and dataset.batch_sampler is not None


@dataclasses.dataclass(frozen=True)
class Collated:
    """Stands for all elements of a batch. The others are None."""

    batch: Any


class Dumped(bytes):
    """An element, as a worker has pickled it: tensors in the queue of a worker would take a descriptor each."""


class _Counted(Generic[T]):
    def __init__(self, collate_fn: Callable[[list[Any]], T]) -> None:
        self._collate_fn = collate_fn

    def __call__(self, elements: list[Any]) -> tuple[int, T]:
        return len(elements), self._collate_fn(elements)


def _dumped(elements: list[Any]) -> list[Dumped]:
    return [Dumped(dump(element)) for element in elements]


def dumped(element: Any) -> bytes:
    return element if type(element) is Dumped else dump(element)


def loaded(element: Any) -> Any:
    """The inverse of dumped(), for an element that a worker has pickled; any other as it is."""
    return pickle.loads(element) if type(element) is Dumped else element


class LoaderElements:
    """Iterates over the elements of the loader's batches, with END_OF_BATCH behind each batch."""

    def __init__(self, loader: DataLoader[Any], runners: int, micro_batches: int, most: int) -> None:
        """micro_batches: how many a runner has in a step. most: how many elements of a batch a step takes."""
        self.generators = generator_states()
        """The states with which the reading process begins, so that the loader shuffles as it would here."""
        self.parts = {name: getattr(loader, name) for name in PARTS}
        self.collates = runners * micro_batches == 1
        self._runners = runners
        self._round = most // micro_batches
        self._most = most
        self._loader: DataLoader[Any] = copy.copy(
            loader
        )  # The host's own has another collate_fn, and may be iterated, too.
        self._loader._iterator = None  # The iterator of persistent workers stays with the host.
        self._loader.pin_memory = False
        if self.collates:
            self._loader.collate_fn = _Counted(loader.collate_fn)
        else:
            self._loader.collate_fn = _dumped if loader.num_workers else list

    def own_generators(self) -> list[torch.Generator]:
        return own_generators(self._loader)

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            count = batch[0] if self.collates else len(batch)
            if count > self._most:
                raise DataError(
                    f"the DataLoader gave a batch of {count} elements, but a step takes {self._most}: make "
                    "batch_size_per_device larger, which is the most that a runner computes at once"
                )
            if self.collates:
                yield from [Collated(batch[1]), *[None] * (count - 1)]
            else:
                yield from self._dealt(batch)
            yield END_OF_BATCH

    def _dealt(self, batch: list[T]) -> Iterator[T]:
        """The batch in an order in which each runner gets neighbours, though runners get elements in turn. Parts are as
        even as possible."""
        for begin in range(0, len(batch), self._round):
            part = batch[begin : begin + self._round]
            sizes = [len(range(rank, len(part), self._runners)) for rank in range(self._runners)]
            firsts = [sum(sizes[:rank]) for rank in range(self._runners)]
            for row in range(sizes[0]):
                for rank in range(self._runners):
                    if row < sizes[rank]:
                        yield part[firsts[rank] + row]


def _most_elements(loader: DataLoader[Any]) -> int | None:
    """The most elements of a batch; None if the loader does not say."""
    if loader.batch_size is not None:
        return loader.batch_size
    sampler: Any = loader.batch_sampler
    if isinstance(sampler, (list, tuple)):
        return max(map(len, sampler), default=1)
    size = getattr(sampler, "batch_size", None)
    return size if type(size) is int else None


def _has_no_batch(loader: DataLoader[Any]) -> bool:
    try:
        return len(loader) == 0
    except TypeError:  # The loader of a stream has no length, for instance.
        return False


def taken(
    loader: DataLoader[Any], shape: tuple[int, int, int], keys: Container[str], device: str
) -> tuple[LoaderElements, Callable[[list[Any]], Any] | None, list[str]]:
    """What a manager makes of a loader: dataset, collate_fn and settings. Raises ConfigError if these disagree, and
    DataError for a loader without a batch.

    shape: runners, grad_accumulation_steps and batch_size_per_device, as the configuration has them. keys: those that
    it sets.
    """
    runners, micro_batches, per_device = shape
    if "nprocs" not in keys and device != "cpu" and ("runners.device" in keys or "runners.devices" in keys):
        raise ConfigError(
            "the batches of a DataLoader are divided among the runners: pass nprocs, which is to be known before "
            "devices are counted",
            "nprocs",
        )
    if "data.drop_last" in keys:
        raise ConfigError("data.drop_last has no effect with a DataLoader: its own drop_last counts", "data.drop_last")
    if _has_no_batch(loader):
        raise DataError(
            f"the DataLoader gives no batch: its data fill none (batch_size={loader.batch_size}, "
            f"drop_last={loader.drop_last}); pass drop_last=False, or make batches smaller"
        )
    parts = runners * micro_batches
    most = _most_elements(loader)
    named = f"{runners} runners" + (f" x {micro_batches} grad_accumulation_steps" if micro_batches > 1 else "")
    settings = ["data.drop_last=false"]
    if most is None:
        if "batch_size_per_device" not in keys:
            raise ConfigError(
                "the DataLoader has a batch_sampler of its own, which does not say how large batches are: pass "
                "batch_size_per_device, the most elements of a batch that a runner computes at once",
                "batch_size_per_device",
            )
        most = parts * per_device
    elif loader.batch_size is not None and most % parts:
        raise ConfigError(
            f"a batch of the DataLoader (batch_size={most}) cannot be divided evenly among {named}: make it a "
            f"multiple of {parts}, or choose another nprocs",
            "batch_size_per_device",
        )
    if "batch_size_per_device" not in keys:
        settings.append(f"batch_size_per_device={-(-most // parts)}")
    elif parts * per_device != most if loader.batch_size is not None else parts * per_device < most:
        raise ConfigError(
            f"batch_size_per_device is {per_device}, but the DataLoader (batch_size={most}) gives each of {named} "
            f"{most / parts:g}: leave it out",
            "batch_size_per_device",
        )
    if parts > 1 and "loss_scaling" not in keys:
        settings.append("loss_scaling=samples")  # A last batch is the mean over its samples, however it is divided.
    dataset = LoaderElements(loader, runners, micro_batches, parts * -(-most // parts))
    is_default = loader.collate_fn is torch.utils.data.default_collate
    return dataset, None if dataset.collates or is_default else loader.collate_fn, settings
