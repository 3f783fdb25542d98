"""Tests of tensors on GPUs in accelmgr.distributed. No machine here has one: marked tensors of the CPU stand for them.

CUDA or NCCL is found unusable, so the tensors go through CPU memory. What goes over NCCL is tested in
test_distributed_nccl.py, and in C++ (tests/launcher/distributed/device_group_test.cpp).
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from test_distributed import error_of, ranks

from accelmgr import distributed
from accelmgr.compat import ml_mp
from accelmgr.distributed import _devices


class Gpus(_devices.Devices):
    def __init__(self) -> None:
        self._there: list[torch.Tensor] = []
        self.copies = 0

    def mark(self, tensor: torch.Tensor) -> torch.Tensor:
        self._there.append(tensor)
        return tensor

    def has(self, tensor: torch.Tensor) -> bool:
        return any(other.data_ptr() == tensor.data_ptr() for other in self._there)

    def place_of(self, tensor: torch.Tensor) -> tuple[int, int]:
        return 0, 0

    def computing(self, tensor: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def empty(self, shape: list[int], like: torch.Tensor) -> torch.Tensor:
        return self.mark(torch.full(shape, 77).to(like.dtype))

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        assert self.has(tensor)
        self.copies += 1
        return tensor.clone()

    def from_host(self, tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        assert self.has(like)
        return self.mark(tensor.clone())

    def home(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.mark(tensor.clone())


def on_gpus() -> Gpus:
    """Gives this rank GPUs."""
    gpus = Gpus()
    _devices.devices = gpus
    return gpus


def _collectives(rank: int) -> list[Any]:
    d, gpus = distributed, on_gpus()
    own = gpus.mark(torch.tensor([1.0, 2, 3, 4]) * (rank + 1))
    whole = gpus.mark(torch.tensor([0b1100 + rank, 7], dtype=torch.int16))
    found = [
        d.all_reduce(own),
        d.all_reduce(own, "MAX"),
        d.all_reduce(whole, "AND"),
        d.all_gather(own),
        d.all_gather(gpus.mark(torch.tensor(rank + 0.5))),
        d.reduce_scatter(own),
        d.all_to_all(own),
        d.broadcast(own, src=1),
        d.broadcast(own if rank == 1 else None, src=1, safe_mode=True),
        d.all_reduce(own, group=[rank]),
    ]
    assert all(gpus.has(tensor) for tensor in found)
    assert own.tolist() == [value * (rank + 1) for value in [1, 2, 3, 4]]
    assert distributed.all_reduce(1.5) == 3  # A number stays in CPU memory.
    return [tensor.tolist() for tensor in found]


@pytest.mark.parametrize("backend", ["auto", "shm", "gloo"])
def test_tensors_on_gpus_go_through_host_memory_where_nccl_cannot_be_used(backend: str, capfd: Any) -> None:
    for rank, found in enumerate(ranks(_collectives, backend=backend)):
        own = [value * (rank + 1.0) for value in [1, 2, 3, 4]]
        assert found == [
            [3, 6, 9, 12],
            [2, 4, 6, 8],
            [0b1100, 7],
            [1, 2, 3, 4, 2, 4, 6, 8],
            [0.5, 1.5],
            [[3, 6], [9, 12]][rank],
            [[1, 2, 2, 4], [3, 4, 6, 8]][rank],
            [2, 4, 6, 8],
            [2, 4, 6, 8],
            own,
        ]
    said = [line for line in capfd.readouterr().err.splitlines() if "through CPU memory: rank 0: " in line]
    groups = 3  # The world, and two of one rank.
    assert len(said) <= groups and bool(said) == (backend == "auto")


def _groups(rank: int) -> None:
    gpus = on_gpus()
    for backend in ("shm", "gloo", None):
        group = distributed.new_group([0, 1], backend=backend)
        assert distributed.all_reduce(gpus.mark(torch.ones(1)), group=group).tolist() == [2]  # type: ignore[union-attr]


def test_a_group_has_a_backend_of_its_own(capfd: Any) -> None:
    ranks(_groups, backend="auto")
    assert capfd.readouterr().err.count("through CPU memory") == 1  # That of the third group; the others ask for it.


def _in_the_data_group() -> None:
    gpus = on_gpus()
    reduced = distributed.all_reduce(gpus.mark(torch.ones(1)), group=ml_mp.parallel_groups().data)
    assert isinstance(reduced, torch.Tensor) and reduced.tolist() == [2]


@pytest.mark.parametrize("kind", ["data", "model"])
def test_each_kind_of_parallel_groups_has_a_backend_of_its_own(kind: str, capfd: Any) -> None:
    config = ml_mp.MultiprocessConfig(world_size=2, launch_method="fork", **{f"{kind}_parallel_backend": "shm"})
    ml_mp.launch_subprocesses(_in_the_data_group, config)
    asks_for_nccl = kind != "data"
    assert capfd.readouterr().err.count("through CPU memory") == int(asks_for_nccl)


@pytest.mark.parametrize("call", ["initialize", "spawn", "launch"])
def test_nccl_without_gpus_says_what_is_missing_and_what_to_use(call: str) -> None:
    from accelmgr.compat import paddle_spawn

    calls: dict[str, Any] = {
        "initialize": lambda: distributed.initialize("nccl", rank=0, world_size=1),
        "spawn": lambda: distributed.spawn("nccl", print, ()),
        "launch": lambda: paddle_spawn.spawn(print, backend="nccl"),
    }
    assert "nccl" not in distributed.available_backends()
    kind, text = error_of(calls[call])
    assert kind == "ConfigError"
    assert "GPU" in text and "shm" in text and "gloo" in text
