"""Groups and collectives of accelmgr.distributed, and code that some ranks run alone or first."""

from __future__ import annotations

import functools
import math
import operator
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import cloudpickle
import torch

from accelmgr._launch import options
from accelmgr.distributed import _devices
from accelmgr.distributed._context import (
    Context,
    current,
    get_local_rank,
    get_nproc_per_node,
    get_rank,
    get_world_size,
)
from accelmgr.distributed._torch import TorchContext
from accelmgr.errors import CollectiveError, ConfigError, UsageError

Number = int | float | bool

REDUCTIONS: dict[str, Callable[[list[int]], int] | None] = {
    "SUM": sum,
    "AVG": None,
    "PRODUCT": math.prod,
    "MIN": min,
    "MAX": max,
    "AND": functools.partial(functools.reduce, operator.and_),
    "OR": functools.partial(functools.reduce, operator.or_),
}
"""The reductions of tensors, and what each makes of Python's whole numbers."""


def new_group(ranks: list[int], **kwargs: Any) -> Any:
    """A group of some ranks, to pass as `group=`. Keywords: `backend`, `pg_options` (of torch's groups).

    Raises ConfigError for ranks out of range, for a rank that is listed twice, for what is no integer, and for an empty
    list; in a world of one process, an empty list is a group without members.

    Requires: every rank of the world calls it.
    """
    options.known_only("new_group", kwargs, ("backend", "pg_options"))
    context = current()
    if not all(_is_whole(rank) for rank in ranks):
        raise ConfigError(f"the ranks of a group must be integers, not {ranks}", "ranks")
    return context.new_group(list(ranks), kwargs.get("backend"), kwargs.get("pg_options"))


def barrier() -> None:
    """Blocks until all ranks have called it."""
    current().barrier()


def _check_op(op: str) -> None:
    if op not in REDUCTIONS:
        raise ConfigError(f"unknown reduction '{op}'; there are: {', '.join(REDUCTIONS)}", "op")


def _tensor_of(number: float) -> torch.Tensor:
    """A 0-d tensor of a bool or a number; a number becomes float64, as Python's floats are."""
    return torch.tensor(number, dtype=torch.bool if isinstance(number, bool) else torch.float64)


def all_reduce(tensor: torch.Tensor | Number, op: str = "SUM", group: Any = None) -> torch.Tensor | Number:
    """Reduces tensors of one shape and dtype, or numbers. op: SUM, AVG, PRODUCT, MIN, MAX, AND, OR.

    The result of integers of Python is exact, however large it is; integers of tensors wrap as torch's do. group: a
    list of ranks, what new_group() returned, or None: all ranks. A rank outside the group gets its input back. Returns
    a new tensor of the input's shape, dtype and device, or a number of the input's kind.
    """
    _check_op(op)
    context = current()
    members = context.group_of(group)
    if isinstance(tensor, (bool, int, float)):
        if not context.contains(members) or context.world_size() == 1:
            return tensor
        if _is_whole(tensor):
            return _reduce_whole(context, int(tensor), op, members)
        reduced: Number = context.all_reduce(_on(context, _tensor_of(tensor)), op, members).item()
        return reduced
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"all_reduce: a {type(tensor).__name__} cannot be reduced; tensors and numbers can")
    return context.all_reduce(tensor, op, members) if context.contains(members) else tensor


def _on(context: Context, tensor: torch.Tensor) -> torch.Tensor:
    """Moves the tensor of a number to the context's device: nccl takes tensors of its device only."""
    return tensor.to(context.device()) if isinstance(context, TorchContext) else tensor


def all_gather(tensor: Any, group: Any = None) -> Any:
    """Gathers the inputs of all ranks, in the order of ranks.

    Tensors of one shape and dtype are concatenated on dimension 0 (a 0-d one counts as one element). Numbers become a
    tensor of shape (ranks,), int64, bool or float64. Strings and other objects become a list; objects are pickled.
    group: as in all_reduce(). Raises CollectiveError on every rank when shapes or kinds differ (it names them), and
    UsageError on every rank when an integer does not fit 64 bits.
    """
    context = current()
    members = context.group_of(group)
    if not context.contains(members):
        return tensor
    if isinstance(tensor, torch.Tensor):
        alone = tensor.dim() == 0 and context.world_size() == 1
        return tensor.reshape(1) if alone else context.all_gather(tensor, members)
    if _is_whole(tensor):
        return _gather_whole(context, tensor, members)
    if isinstance(tensor, (bool, float)):
        return context.all_gather(_on(context, _tensor_of(tensor).reshape(1)), members)
    gathered = context.all_gather_objects(tensor, members)
    _check_calls(gathered)
    return gathered


def broadcast(tensor: Any, src: int = 0, safe_mode: bool = False) -> Any:
    """Returns what rank `src` passes on every rank: a tensor, number, string, or any object that can be pickled.

    The other ranks pass a tensor of the same shape and dtype, or a number, string or object. With safe_mode they may
    pass anything, None included, at the cost of another collective; a tensor then travels through CPU memory, and
    arrives on the current GPU of each rank if it came from one. Integers may be of any size. Raises CollectiveError on
    every rank when tensors or kinds differ, and UsageError on every rank for what cannot be sent: None, and tensors
    that are not dense.
    """
    context = current()
    if not 0 <= src < context.world_size():
        raise UsageError(
            f"broadcast: there is no rank {src} in a world of {context.world_size()}; ranks are counted from 0"
        )
    if safe_mode:
        return _broadcast_safely(context, tensor, src)
    if isinstance(tensor, torch.Tensor):
        return context.broadcast(tensor, src)
    if _is_whole(tensor):
        return _of_all(context, f"broadcast from rank {src}", tensor, context.group_of(None))[src]
    if isinstance(tensor, (bool, float)):
        return context.broadcast(_on(context, _tensor_of(tensor)), src).item()
    if tensor is None:
        raise TypeError("broadcast: a NoneType cannot be sent; only safe_mode=True can receive a value of unknown kind")
    return _send(context, _Sent("object", tensor), src).what


class _Sent(NamedTuple):
    """What the source of a broadcast tells the other ranks."""

    kind: str
    """`object`; `tensor`: dtype, shape and whether it is on a GPU; `refused`: why it cannot be sent."""
    what: Any


def _pickled(mine: _Sent) -> bytes:
    try:
        data: bytes = cloudpickle.dumps(mine)
    except Exception as error:
        why = f"passed a {type(mine.what).__name__} that cannot be pickled: {type(error).__name__}: {error}"
        data = pickle.dumps(_Sent("refused", why))
    return data


def _send(context: Context, mine: _Sent, src: int) -> _Sent:
    """What the source passes, on every rank. Raises UsageError on every rank if it cannot be sent."""
    sent = mine
    if context.world_size() > 1:
        sent = pickle.loads(context.broadcast_object(_pickled(mine) if context.rank() == src else b"", src))
    if sent.kind == "refused":
        raise UsageError(f"broadcast: the source, rank {src}, {sent.what}")
    return sent


def _header(context: Context, tensor: Any) -> _Sent:
    if tensor is None:
        return _Sent("refused", "passed a NoneType; only tensors, numbers, strings and objects can be sent")
    if not isinstance(tensor, torch.Tensor):
        return _Sent("object", tensor)
    try:
        context.check_sendable(tensor)
    except UsageError as error:
        return _Sent("refused", f"passed {error}")
    return _Sent("tensor", (tensor.dtype, tuple(tensor.shape), _devices.devices.has(tensor)))


def _broadcast_safely(context: Context, tensor: Any, src: int) -> Any:
    # The source first says what it will send, or that it cannot: the others do not wait in vain then.
    is_source = context.rank() == src
    sent = _send(context, _header(context, tensor) if is_source else _Sent("object", None), src)
    if sent.kind == "object":
        return sent.what
    dtype, shape, on_gpu = sent.what
    own = tensor if is_source else torch.empty(shape, dtype=dtype)
    if isinstance(context, TorchContext) or not on_gpu:
        return context.broadcast(_on(context, own), src)
    received = context.broadcast(_devices.devices.to_host(own) if is_source else own, src)
    return tensor if is_source else _devices.devices.home(received)


def all_gather_tensors_with_shapes(
    tensor: torch.Tensor, shapes: Sequence[Sequence[int]], group: Any = None
) -> list[torch.Tensor]:
    """Gathers tensors of one dtype whose shapes differ, in the order of ranks.

    shapes: the shape of each member's tensor; all members pass the same. group: as in all_reduce(); a rank outside gets
    its own tensor alone. Raises UsageError for a list of another length, and CollectiveError on every rank where a
    tensor does not have its shape.
    """
    context = current()
    members = context.group_of(group)
    if not context.contains(members):
        return [tensor]
    wanted = [tuple(shape) for shape in shapes]
    found = context.all_gather_objects((str(tensor.dtype), tuple(tensor.shape), wanted), members)
    if any(theirs != found[0][2] or dtype != found[0][0] for dtype, _, theirs in found):
        raise CollectiveError(
            f"all_gather_tensors_with_shapes: the members passed different shapes or dtypes: {found}", "mismatch"
        )
    if len(wanted) != len(found):
        raise UsageError(
            f"all_gather_tensors_with_shapes: {len(wanted)} shapes were passed; there are {len(found)} members"
        )
    for member, (shape, (_, own, _)) in enumerate(zip(wanted, found, strict=True)):
        if shape != own:
            raise CollectiveError(
                f"all_gather_tensors_with_shapes: member {member} passed a tensor of {list(own)}, not {list(shape)}",
                "mismatch",
            )
    sizes = [math.prod(shape) for shape in wanted]
    padded = tensor.detach().new_zeros(max(sizes))
    padded[: tensor.numel()] = tensor.detach().reshape(-1)
    rows = context.all_gather(padded, members).reshape(len(sizes), -1)
    return [row[:size].reshape(shape).clone() for row, size, shape in zip(rows, sizes, wanted, strict=True)]


def reduce_scatter(tensor: torch.Tensor, op: str = "SUM", group: Any = None) -> torch.Tensor:
    """Reduces the tensors of all ranks and returns block i of dimension 0 to rank i.

    Dimension 0 must be a multiple of the group's size. op, group: as in all_reduce().
    """
    _check_op(op)
    context = current()
    members = context.group_of(group)
    return context.reduce_scatter(tensor, op, members) if context.contains(members) else tensor


def all_to_all(input: torch.Tensor, group: Any = None) -> torch.Tensor:
    """Sends block i of dimension 0 to rank i. The size of dimension 0 must be a multiple of the group's size.

    It has a backward pass, which sends the gradients back in the same way. In serial it returns the input.
    """
    context = current()
    members = context.group_of(group)
    return context.all_to_all(input, members) if context.contains(members) else input


# Integers of Python have no bound; those of tensors have 64 bits. So integers are gathered as objects. Every member
# reduces the same list, and gets the exact result, or the same error as the others.


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


class _Contribution(NamedTuple):
    """The number that a member contributes to `call`."""

    call: str
    number: int


def _check_calls(gathered: list[Any]) -> None:
    """Raises CollectiveError if members are in different calls; the backend sees the same gather of objects."""
    calls = [item.call if isinstance(item, _Contribution) else "all_gather of objects" for item in gathered]
    if len(set(calls)) > 1:
        each = "; ".join(f"member {member} called {call}" for member, call in enumerate(calls))
        raise CollectiveError(f"the members made different calls: {each}", "mismatch")


def _of_all(context: Context, call: str, number: int, members: Any) -> list[int]:
    gathered = context.all_gather_objects(_Contribution(f"{call} of whole numbers", int(number)), members)
    _check_calls(gathered)
    return [item.number for item in gathered]


def _reduce_whole(context: Context, number: int, op: str, members: Any) -> int:
    if (reduction := REDUCTIONS[op]) is None:
        raise UsageError(f"all_reduce: the reduction {op} of whole numbers is not defined; pass a float")
    return reduction(_of_all(context, f"all_reduce {op}", number, members))


def _gather_whole(context: Context, number: int, members: Any) -> torch.Tensor:
    numbers = _of_all(context, "all_gather", number, members)
    for member, value in enumerate(numbers):
        if not -(2**63) <= value < 2**63:
            raise UsageError(
                f"all_gather: the number of member {member}, {value}, does not fit into the 64 bits of the "
                "returned tensor; pass a list of numbers, which is gathered as an object"
            )
    return torch.tensor(numbers)


def one_rank_only(rank: int = 0, with_barrier: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: the function runs on `rank` alone; the other ranks get None. with_barrier: all ranks wait for it."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
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
    """The body of the `with` runs on `rank` first, then on the others. local: on this local rank of each machine first.

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
