"""Code that some ranks run alone, or first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from accelmgr.distributed._collectives import barrier
from accelmgr.distributed._context import get_local_rank, get_nproc_per_node, get_rank, get_world_size
from accelmgr.errors import ConfigError


def one_rank_only(rank: int = 0, with_barrier: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: the function runs on `rank` alone; the other ranks get None. with_barrier: all ranks wait for it."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            result = None
            if get_rank() == rank:
                result = function(*args, **kwargs)
            if with_barrier:
                barrier()
            return result

        return wrapper

    return decorate


@contextmanager
def one_rank_first(rank: int = 0, local: bool = False) -> Iterator[None]:
    """The body of the `with` runs on `rank` first, then on the others. local: on this local rank of each host first.

    The other ranks go on also when the body failed on the first one. Raises ConfigError (a ValueError) "rank should be
    between 0 and N - 1, but given R".
    """
    current = get_local_rank() if local else get_rank()
    size = get_nproc_per_node() if local else get_world_size()
    if rank >= size or rank < 0:
        raise ConfigError(f"rank should be between 0 and {size - 1}, but given {rank}", "rank")
    if current != rank:
        barrier()
    try:
        yield
    finally:
        if current == rank:
            barrier()
