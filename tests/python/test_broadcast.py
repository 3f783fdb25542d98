"""Tests of broadcast() and of the smaller forms of collectives: objects, safe mode, worlds of one rank."""

from __future__ import annotations

import pathlib
import time
from typing import Any

import pytest
import torch
from test_distributed import error_of, ranks

from accelmgr import distributed

OBJECTS = [pathlib.Path("/a/b"), {"rate": 0.1, "names": ["x"]}, [1, None], (2, "b"), frozenset({3}), b"bytes", 1 + 2j]


def _objects(rank: int) -> list[Any]:
    own = OBJECTS if rank == 1 else [type(value)() if type(value) is not pathlib.PosixPath else "" for value in OBJECTS]
    found = [distributed.broadcast(value, src=1) for value in own]
    others: list[Any] = [None, 7, "text", torch.ones(3), 2.5, [], {}]
    return found + [
        distributed.broadcast(value if rank == 1 else other, src=1, safe_mode=True)
        for value, other in zip(OBJECTS, others, strict=True)
    ]


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_any_object_that_can_be_pickled_is_broadcast(backend: str) -> None:
    for found in ranks(_objects, backend=backend):
        assert found == OBJECTS + OBJECTS


def _safely(rank: int) -> list[Any]:
    values: list[Any] = [torch.arange(3.0), 2.5, "text", 2**70, True]
    others: list[Any] = ["text", torch.ones(2), None, {"a": 1}, pathlib.Path("a")]
    return [
        distributed.broadcast(value if rank == 0 else other, safe_mode=True)
        for value, other in zip(values, others, strict=True)
    ]


def test_in_safe_mode_the_others_pass_anything() -> None:
    for found in ranks(_safely):
        assert torch.equal(found[0], torch.arange(3.0))
        assert found[1:] == [2.5, "text", 2**70, True]


UNSENDABLE: list[tuple[Any, str]] = [
    (lambda: torch.ones(2, device="meta"), "on meta"),
    (lambda: torch.ones(2).to(torch.float8_e4m3fn), "float8_e4m3fn"),
    (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "quantized"),
    (lambda: torch.nested.nested_tensor([torch.ones(1)]), "nested"),
    (lambda: torch.eye(2).to_sparse(), "torch.sparse_coo; only dense ones can be sent"),
    (lambda: None, "passed a NoneType"),
    (lambda: (value for value in ()), "passed a generator that cannot be pickled"),
]


def _unsendable(rank: int) -> list[tuple[str, str, bool]]:
    found = []
    for make, _ in UNSENDABLE:
        begin = time.monotonic()
        kind, text = error_of(lambda make=make: distributed.broadcast(make() if rank == 0 else None, safe_mode=True))
        found.append((kind, text, time.monotonic() - begin < 50))  # The timeout is longer.
    assert distributed.all_reduce(1) == 2
    return found


def test_what_the_source_cannot_send_fails_on_every_rank_at_once() -> None:
    for found in ranks(_unsendable):
        for (kind, text, soon), (_, expected) in zip(found, UNSENDABLE, strict=True):
            assert kind == "UsageError" and "the source, rank 0, " in text and expected in text, text
            assert soon


def _unpicklable(rank: int) -> tuple[str, str]:
    return error_of(lambda: distributed.broadcast((value for value in ()) if rank == 0 else {}))


def test_an_object_that_cannot_be_pickled_fails_on_every_rank() -> None:
    for kind, text in ranks(_unpicklable):
        assert kind == "UsageError" and "the source, rank 0, passed a generator that cannot be pickled" in text


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


def _of_one_element(rank: int) -> Any:
    return distributed.all_gather(torch.tensor(float(rank))), distributed.all_gather(torch.tensor(5.0), group=[rank])


def test_a_0_d_tensor_is_one_element_of_what_is_gathered() -> None:
    for gathered, alone in ranks(_of_one_element):
        assert gathered.tolist() == [0, 1] and alone.tolist() == [5]
    assert distributed.all_gather(torch.tensor(3.0)).tolist() == [3]  # In a world of one rank.


def test_alone_objects_and_groups_without_ranks_will_do() -> None:
    for value in OBJECTS:
        assert distributed.broadcast(value) == distributed.broadcast(value, safe_mode=True) == value
    nobody = distributed.new_group([])
    tensor = torch.ones(2)
    assert distributed.all_reduce(tensor, group=nobody) is tensor
    assert distributed.all_gather(tensor, group=[]) is tensor
    assert error_of(lambda: distributed.new_group(["a", "b"])) == (  # type: ignore[list-item]
        "ConfigError",
        "the ranks of a group must be integers, not ['a', 'b']",
    )
    shaped = distributed.all_gather_tensors_with_shapes(tensor, [[2]])
    assert [one.tolist() for one in shaped] == [[1, 1]]
