"""Tests of accelmgr.distributed over a process group of torch.distributed, and of one beside the engine."""

from __future__ import annotations

import logging
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_distributed import error_of, join_by_torch, launched, ranks

from accelmgr import distributed
from accelmgr.distributed import _process_group, _torch

MISMATCHES: dict[str, tuple[Any, Any, list[str]]] = {
    "whole and float": (
        lambda: distributed.all_reduce(0),
        lambda: distributed.all_reduce(2.5),
        ["member 0 called all_gather of objects", "member 1 called all_reduce SUM float64 []"],
    ),
    "reductions": (
        lambda: distributed.all_reduce(torch.ones(2)),
        lambda: distributed.all_reduce(torch.ones(2), "MAX"),
        ["all_reduce SUM float32 [2]", "all_reduce MAX float32 [2]"],
    ),
    "shapes": (
        lambda: distributed.broadcast(torch.ones(4)),
        lambda: distributed.broadcast(torch.ones(2)),
        ["broadcast from rank 0 float32 [4]", "broadcast from rank 0 float32 [2]"],
    ),
    "roots": (
        lambda: distributed.broadcast(torch.ones(2), src=0),
        lambda: distributed.broadcast(torch.ones(2), src=1),
        ["from rank 0", "from rank 1"],
    ),
    "calls": (
        distributed.barrier,
        lambda: distributed.reduce_scatter(torch.ones(2)),
        ["member 0 called barrier", "member 1 called reduce_scatter SUM float32 [2]"],
    ),
    "exchange": (
        lambda: distributed.all_to_all(torch.ones(2)),
        lambda: distributed.all_to_all(torch.ones(4)),
        ["all_to_all float32 [2]", "all_to_all float32 [4]"],
    ),
}


def _mismatch(rank: int, path: str) -> dict[str, Any]:
    join_by_torch(rank, path)
    found = {what: error_of(calls[rank]) for what, calls in MISMATCHES.items()}
    found["after"] = distributed.all_reduce(torch.tensor([1.0])).item()
    distributed.finalize()
    return found


def test_different_calls_are_named_on_every_rank(tmp_path: Any) -> None:
    for found in launched(_mismatch, str(tmp_path), count=2):
        assert found.pop("after") == 2
        for what, (kind, text) in found.items():
            assert kind == "CollectiveError", (what, text)
            for part in MISMATCHES[what][2]:
                assert part in text, (what, text)


def _two_worlds(rank: int, path: str) -> list[float]:
    _torch.id = lambda _: 7  # type: ignore[attr-defined]  # As if the second world had the address of the first.
    sums = []
    for world in ("first", "second"):
        join_by_torch(rank, path, world)
        total = distributed.all_reduce(float(rank), group=[0, 1])
        assert isinstance(total, float)
        sums.append(total)
        dist.destroy_process_group()
    return sums


def test_the_groups_of_a_world_end_with_it(tmp_path: Any) -> None:
    assert launched(_two_worlds, str(tmp_path), count=2) == [[1.0, 1.0]] * 2


def _bitwise(rank: int, path: str) -> list[Any]:
    join_by_torch(rank, path)
    found: list[Any] = []
    for dtype in (torch.uint8, torch.int16, torch.int32, torch.int64):
        tensor = torch.tensor([[0b1100 + rank, 0b1010]], dtype=dtype)
        found += [distributed.all_reduce(tensor, "AND"), distributed.all_reduce(tensor, "OR")]
    flags = torch.tensor([True, rank == 0, False])
    found += [distributed.all_reduce(flags, "AND"), distributed.all_reduce(flags, "OR")]
    found += [distributed.all_reduce(torch.tensor(6 + rank), "AND"), distributed.all_reduce(flags[:0], "OR")]
    assert error_of(lambda: distributed.all_reduce(torch.ones(1), "AND"))[0] == "UsageError"
    distributed.finalize()
    return [(value.dtype, value.tolist()) for value in found]


def test_integers_have_and_and_or(tmp_path: Any) -> None:
    dtypes = (torch.uint8, torch.int16, torch.int32, torch.int64)
    expected = [(dtype, values) for dtype in dtypes for values in ([[0b1100, 0b1010]], [[0b1101, 0b1010]])]
    expected += [(torch.bool, [True, False, False]), (torch.bool, [True, True, False])]
    expected += [(torch.int64, 6), (torch.bool, [])]
    assert launched(_bitwise, str(tmp_path), count=2) == [expected] * 2


# Beside the engine


def _beside(rank: int) -> tuple[Any, ...]:
    inside = dist.get_rank(), dist.get_world_size(), dist.get_backend(), distributed.model_name()
    tensor = torch.tensor([float(rank + 1)])
    dist.all_reduce(tensor)
    assert distributed.all_reduce(rank + 1) == 3
    distributed.finalize()
    assert not dist.is_initialized()
    dist.init_process_group("gloo", rank=rank, world_size=2)  # The program's own, at MASTER_ADDR and MASTER_PORT.
    dist.all_reduce(tensor)
    dist.destroy_process_group()
    return *inside, tensor.item()


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_torch_distributed_is_initialized_in_a_spawned_function(method: str) -> None:
    assert ranks(_beside, backend="gloo", method=method) == [(rank, 2, "gloo", "accelmgr-dist", 6.0) for rank in (0, 1)]


def _groups_of_torch(rank: int) -> list[Any]:
    alone, both = dist.new_group([1]), dist.new_group([0, 1])
    groups = [alone, both, dist.group.WORLD]
    return [distributed.all_reduce(torch.tensor([rank + 1.0]), group=group).tolist() for group in groups]


def test_a_group_of_torch_is_a_group() -> None:
    assert ranks(_groups_of_torch, backend="gloo") == [[[rank + 1], [3], [3]] for rank in (0, 1)]


def _no_port(rank: int, path: str, backend: str) -> tuple[Any, ...]:
    def none() -> int:
        raise OSError("no port is free")

    os.environ.pop("ACCELMGR_WORLD_MEMORY", None)
    _process_group._free_port = none
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("accelmgr.distributed").addHandler(handler)
    distributed.initialize(backend, init_method=f"file://{path}/store", rank=rank, world_size=2, timeout=60)
    found = messages, dist.is_initialized(), "MASTER_PORT" in os.environ, distributed.all_reduce(rank + 1)
    distributed.finalize()
    return found


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_every_rank_is_told_that_rank_0_finds_no_port(tmp_path: Any, backend: str) -> None:
    for messages, initialized, has_port, total in launched(_no_port, str(tmp_path), backend, count=2):
        assert len(messages) == 1 and "rank 0 finds no place for it: no port is free" in messages[0]
        assert (initialized, has_port, total) == (False, False, 3)


def _own_process_group(rank: int) -> float:
    assert not dist.is_initialized()  # torch has no backend shm.
    dist.init_process_group("gloo")
    tensor = torch.tensor([1.0])
    dist.all_reduce(tensor)
    dist.destroy_process_group()
    assert distributed.all_reduce(1) == 2
    return tensor.item()


def test_a_program_may_make_its_own_process_group() -> None:
    assert ranks(_own_process_group) == [2.0, 2.0]


def _by_hand(rank: int, path: str, address: str | None) -> tuple[Any, ...]:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "ACCELMGR_WORLD_MEMORY", "MASTER_ADDR"):
        os.environ.pop(name, None)
    if address is not None:
        os.environ["MASTER_ADDR"] = address
    distributed.initialize("gloo", init_method=f"file://{path}/store", rank=rank, world_size=2, timeout=60)
    inside = dist.get_rank(), distributed.model_name(), "MASTER_ADDR" in os.environ, os.environ["MASTER_PORT"].isdigit()
    distributed.finalize()
    return *inside, dist.is_initialized()


@pytest.mark.parametrize("address", [None, "nowhere.invalid"])
def test_torch_distributed_is_initialized_with_the_context_and_ends_with_it(tmp_path: Any, address: str) -> None:
    expected = [(rank, "accelmgr-dist", True, True, False) for rank in (0, 1)]
    assert launched(_by_hand, str(tmp_path), address, count=2) == expected


def _where_rank_1_fails(rank: int, path: str) -> tuple[bool, Any]:
    os.environ.pop("ACCELMGR_WORLD_MEMORY", None)
    real = dist.init_process_group

    def fails_at_the_end(*args: Any, **options: Any) -> None:
        real(*args, **options)
        raise RuntimeError("the last step failed")

    if rank == 1:
        dist.init_process_group = fails_at_the_end
    distributed.initialize("gloo", init_method=f"file://{path}/store", rank=rank, world_size=2, timeout=60)
    has_one = rank == 0 and dist.is_initialized()
    total = distributed.all_reduce(rank + 1)
    distributed.finalize()
    if rank == 1:
        dist.destroy_process_group()
    return has_one, total


def test_no_rank_has_a_process_group_if_one_fails_to_make_it(tmp_path: Any) -> None:
    # A rank that waited for the others to say so has also waited for them to connect.
    assert launched(_where_rank_1_fails, str(tmp_path), count=2) == [(False, 3)] * 2


def _assert_initialized(rank: int) -> None:
    assert dist.is_initialized() and dist.get_world_size() == 1
    assert os.environ["MASTER_PORT"].isdigit()


def _alone(rank: int) -> tuple[bool, bool]:
    before = dict(os.environ)
    distributed.spawn("gloo", _assert_initialized, (), nproc_per_node=1)
    return dist.is_initialized(), dict(os.environ) == before


def test_one_process_has_a_process_group_as_long_as_the_function_runs() -> None:
    assert launched(_alone, count=1) == [(False, True)]
