"""Collectives of Python's whole numbers."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from accelmgr.distributed._context import Context
from accelmgr.errors import CollectiveError, UsageError

# Integers of Python have no bound; those of tensors have 64 bits. So integers are gathered as objects. Every member
# reduces the same list, and gets the exact result, or the same error as the others.


def is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


class _Contribution(NamedTuple):
    """The number that a member contributes to `call`."""

    call: str
    number: int


def check_calls(gathered: list[Any]) -> None:
    """Raises CollectiveError if members are in different calls; the backend sees the same gather of objects."""
    calls = [item.call if isinstance(item, _Contribution) else "all_gather of objects" for item in gathered]
    if len(set(calls)) > 1:
        each = "; ".join(f"member {member} called {call}" for member, call in enumerate(calls))
        raise CollectiveError(f"the members made different calls: {each}", "mismatch")


def of_all(context: Context, call: str, number: int, members: Any) -> list[int]:
    gathered = context.all_gather_objects(_Contribution(f"{call} of whole numbers", int(number)), members)
    check_calls(gathered)
    return [item.number for item in gathered]


REDUCTIONS: dict[str, Callable[[list[int]], int]] = {
    "SUM": sum,
    "PRODUCT": math.prod,
    "MIN": min,
    "MAX": max,
    "AND": functools.partial(functools.reduce, operator.and_),
    "OR": functools.partial(functools.reduce, operator.or_),
}


def all_reduce(context: Context, number: int, op: str, members: Any) -> int:
    if op not in REDUCTIONS:
        raise UsageError(f"all_reduce: the reduction {op} of whole numbers is not defined; pass a float")
    return REDUCTIONS[op](of_all(context, f"all_reduce {op}", number, members))


def all_gather(context: Context, number: int, members: Any) -> torch.Tensor:
    numbers = of_all(context, "all_gather", number, members)
    for member, value in enumerate(numbers):
        if not -(2**63) <= value < 2**63:
            raise UsageError(
                f"all_gather: the number of member {member}, {value}, does not fit into the 64 bits of the "
                "returned tensor; pass a list of numbers, which is gathered as an object"
            )
    return torch.tensor(numbers)
