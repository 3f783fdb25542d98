"""Tests of broadcast() and of the smaller forms of collectives: objects, safe mode, worlds of one rank."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch
from test_distributed import error_of, ranks

from accelmgr import distributed

OBJECTS = [pathlib.Path("/a/b"), {"rate": 0.1, "names": ["x"]}, [1, None], (2, "b"), frozenset({3}), b"bytes", 1 + 2j]


def _objects(rank: int) -> list[Any]:
    own = OBJECTS if rank == 1 else [type(value)() if type(value) is not pathlib.PosixPath else "" for value in OBJECTS]
    found = [distributed.broadcast(value, src=1) for value in own]
    others: list[Any] = [None, 7, "text", torch.ones(3), 2.5, [], {}]  # In safe mode these may be anything.
    return found + [
        distributed.broadcast(value if rank == 1 else other, src=1, safe_mode=True)
        for value, other in zip(OBJECTS, others, strict=True)
    ]


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_any_object_that_can_be_pickled_is_broadcast(backend: str) -> None:
    for found in ranks(_objects, backend=backend):
        assert found == OBJECTS + OBJECTS


UNSENDABLE: list[tuple[Any, str]] = [
    (lambda: torch.ones(2, device="meta"), "on meta"),
    (lambda: torch.ones(2).to(torch.float8_e4m3fn), "float8_e4m3fn"),
    (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "quantized"),
    (lambda: torch.nested.nested_tensor([torch.ones(1)]), "nested"),
    (lambda: torch.eye(2).to_sparse(), "torch.sparse_coo; only dense ones can be sent"),
    (lambda: None, "passed a NoneType"),
    (lambda: (value for value in ()), "passed a generator that cannot be pickled"),
]


def _unsendable(rank: int) -> list[tuple[str, str]]:
    found = [
        error_of(lambda make=make: distributed.broadcast(make() if rank == 0 else None, safe_mode=True))
        for make, _ in UNSENDABLE
    ]
    found.append(error_of(lambda: distributed.broadcast(UNSENDABLE[-1][0]() if rank == 0 else {})))
    assert distributed.all_reduce(1) == 2
    return found


def test_what_the_source_cannot_send_fails_on_every_rank() -> None:
    for found in ranks(_unsendable):
        for (kind, text), (_, expected) in zip(found, [*UNSENDABLE, UNSENDABLE[-1]], strict=True):
            assert kind == "UsageError" and "the source, rank 0, " in text and expected in text, text


def _shapes(rank: int) -> tuple[Any, ...]:
    shapes = [[1, 2], [0, 3], [2, 2]]
    own = torch.arange(4.0)[: [2, 0, 4][rank]].reshape(shapes[rank]) + 10 * rank
    found = distributed.all_gather_tensors_with_shapes(own, shapes)
    some = distributed.all_gather_tensors_with_shapes(own, [shapes[0], shapes[2]], group=[0, 2])
    wrong = error_of(lambda: distributed.all_gather_tensors_with_shapes(own, [[1, 2]] * 3))
    short = error_of(lambda: distributed.all_gather_tensors_with_shapes(own, shapes[:2]))
    differing = error_of(lambda: distributed.all_gather_tensors_with_shapes(own, [[rank]] * 3))
    return [tensor.tolist() for tensor in found], [tensor.shape for tensor in some], wrong, short, differing


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_tensors_of_different_shapes_are_gathered(backend: str) -> None:
    for rank, (found, some, wrong, short, differing) in enumerate(ranks(_shapes, count=3, backend=backend)):
        assert found == [[[0, 1]], [], [[20, 21], [22, 23]]]
        assert some == ([(0, 3)] if rank == 1 else [(1, 2), (2, 2)])
        assert wrong[0] == "CollectiveError" and "member 1 passed a tensor of [0, 3], not [1, 2]" in wrong[1]
        assert short[0] == "UsageError" and "2 shapes were passed; there are 3 members" in short[1]
        assert differing[0] == "CollectiveError"
