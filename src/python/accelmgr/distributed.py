"""Who this process is among others, and collectives of tensors with them.

Works without any configuration (serial: rank 0 of 1), in a process that spawn(), `accelmgr spawn` or torchrun started,
after initialize(), and over a torch.distributed process group that the user has made. The names, arguments and defaults
are those of ignite.distributed.

The context is looked for when first asked for: that of initialize(), else that of torch.distributed when somebody has
initialized it, else that of the environment a launcher set (RANK, WORLD_SIZE, ...), else serial.

Call these functions from one thread at a time. Collectives block with the interpreter's lock released, at most for the
context's timeout, and raise CollectiveError; with one process they return their input. No input is changed.
"""

from __future__ import annotations

import functools
import logging
import math
import operator
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any, NamedTuple, Union

import cloudpickle
import torch

from accelmgr import _engine_context, _launch, _native, _torch_context
from accelmgr._launch import SpawnContext
from accelmgr.errors import CollectiveError, ConfigError, UsageError

Group = _native.Group
Number = Union[int, float, bool]
Context = Union[_engine_context.EngineContext, _torch_context.TorchContext]

__all__ = [
    "Group",
    "SpawnContext",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "available_backends",
    "backend",
    "barrier",
    "broadcast",
    "device",
    "finalize",
    "get_local_rank",
    "get_nnodes",
    "get_node_rank",
    "get_nproc_per_node",
    "get_rank",
    "get_world_size",
    "has_hvd_support",
    "has_native_dist_support",
    "has_xla_support",
    "hostname",
    "initialize",
    "is_available",
    "model_name",
    "new_group",
    "one_rank_first",
    "one_rank_only",
    "receive_object",
    "reduce_scatter",
    "registered_computation_models",
    "send_object",
    "set_local_rank",
    "show_config",
    "spawn",
    "sync",
]

logger = logging.getLogger(__name__)

REDUCTIONS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "AND", "OR")
DEFAULT_TIMEOUT_S = 300.0

has_native_dist_support: bool = torch.distributed.is_available()
has_xla_support: bool = False
has_hvd_support: bool = False


_engine = _engine_context.EngineContext()
_torch = _torch_context.TorchContext()
_initialized = False
"""By initialize(): a process group of torch beside it is not what is asked for."""


def _context() -> Context:
    return _torch if not _initialized and _torch_context.is_present() else _engine


# The context


def is_available() -> bool:
    """Whether there are collectives here: always."""
    return True


def sync(temporary: bool = False) -> None:
    """Looks for the context again, after it was made or ended by hand. temporary: each getter looks anew."""
    _native.dist_sync(temporary)


def device() -> torch.device:
    """`cpu`, or `cuda:local_rank` under nccl."""
    return _context().device()


def backend() -> str | None:
    """None in serial; `shm`, `gloo`, `nccl`."""
    return _context().backend()


def available_backends() -> tuple[str, ...]:
    """Those that initialize() and spawn() can use here."""
    return tuple(_native.dist_available_backends())


def model_name() -> str:
    """`serial`, `native-dist` (started by others: torchrun, torch.distributed), `accelmgr-dist`."""
    context = _context()
    return context.name if isinstance(context, _torch_context.TorchContext) else _native.dist_model_name()


class _Serial:
    name = "serial"
    available_backends: tuple[str, ...] = ()


class _NativeDist:
    name = "native-dist"
    available_backends: tuple[str, ...] = ()


class _AccelmgrDist:
    name = "accelmgr-dist"
    available_backends = available_backends()


registered_computation_models: list[type[Any]] = [_Serial, _NativeDist, _AccelmgrDist]
"""By `name`: all that model_name() can say."""


def get_world_size() -> int:
    """1 in serial."""
    return _context().world_size()


def get_rank() -> int:
    """0 in serial."""
    return _context().rank()


def get_local_rank() -> int:
    """Among the processes of this host; 0 in serial. Raises UsageError while it is not known."""
    return _context().local_rank()


def get_nproc_per_node() -> int:
    """Processes of this host; 1 in serial. Raises UsageError while it is not known."""
    return _context().nproc_per_node()


def get_nnodes() -> int:
    """Hosts; 1 in serial. Raises UsageError while it is not known."""
    return _context().nnodes()


def get_node_rank() -> int:
    """Of this host; 0 in serial. Raises UsageError while it is not known."""
    return _context().node_rank()


def hostname() -> str:
    return _native.dist_hostname()


def set_local_rank(index: int) -> None:
    """For a context that was made by hand: what get_local_rank() says from now on. Raises UsageError when negative."""
    _native.dist_set_local_rank(index)
    _torch_context.set_local_rank(index)


def initialize(backend: str, **kwargs: Any) -> None:
    """Joins the other processes; blocks until all are there.

    backend: one of available_backends(), or `auto`: shm on one host, gloo over several. Keywords: `timeout`
    (timedelta or seconds; of the rendezvous and of every collective; default: the launcher's, or 300), `init_method`
    (`env://`, the default, `tcp://HOST:PORT`, `file:///PATH`), `rank`, `world_size` (default: of the environment).

    Raises ConfigError (a ValueError) for an unknown backend, with the available ones, or for values that contradict
    each other; CollectiveError, cause `timeout`, which names the missing ranks; UsageError when there is a context
    already.
    """
    global _initialized
    _launch.known_only("initialize", kwargs, ("timeout", "init_method", "rank", "world_size"))
    if _torch_context.is_present():
        raise UsageError(
            f"initialize(): torch.distributed is initialized already ({_torch.backend()}, rank {_torch.rank()} of "
            f"{_torch.world_size()}), and is what these functions use; finalize() ends it"
        )
    timeout = kwargs.get("timeout")
    _native.dist_initialize(
        backend,
        None if timeout is None else _launch.seconds_of(timeout),
        kwargs.get("init_method") or "",
        kwargs.get("rank"),
        kwargs.get("world_size"),
    )
    _initialized = True


def finalize() -> None:
    """Leaves; serial again. A process group of torch.distributed is destroyed."""
    global _initialized
    _context().finalize()
    _initialized = False
    _torch_context.set_local_rank(None)


def show_config() -> None:
    """Writes who this process is among others to the log, level info."""
    context = _context()
    logger.info("distributed configuration: %s", model_name())
    logger.info("backend: %s", context.backend())
    logger.info("device: %s", context.device().type)
    logger.info("hostname: %s", hostname())
    logger.info("world size: %s", context.world_size())
    logger.info("rank: %s", context.rank())
    logger.info("local rank: %s", context.local_rank())
    logger.info("num processes per_node: %s", context.nproc_per_node())
    logger.info("num nodes: %s", context.nnodes())
    logger.info("node rank: %s", context.node_rank())


def _within(local_rank: int, call: Callable[[], Any]) -> Any:
    """The context of the call is that of the engine, whatever it does with torch.distributed."""
    global _initialized
    before, _initialized = _initialized, True
    try:
        return call()
    finally:
        _initialized = before


def spawn(
    backend: str,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs_dict: Mapping[str, Any] | None = None,
    nproc_per_node: int = 1,
    **kwargs: Any,
) -> SpawnContext | None:
    """`nproc_per_node` processes in a context of `backend`, each of which calls `fn(local_rank, *args, **kwargs_dict)`.

    Keywords: `nnodes` (1), `node_rank` (0), `master_addr` (127.0.0.1), `master_port` (a free one; of several hosts
    2222), `init_method` (`env://`), `timeout` (timedelta or seconds; 300), `join` (True), `daemon` (False),
    `start_method` (`spawn`; `fork`, `forkserver`). Functions and arguments travel by cloudpickle: those of
    `__main__` too.

    Returns None when all have ended, or, with join=False, the context. One process with `join` is this one. Raises
    ConfigError (a ValueError) for an unknown backend and for options that cannot be; SpawnError, with rank and
    traceback, when a process fails: the others are ended.
    """
    hosts = ("nnodes", "node_rank", "master_addr", "master_port", "init_method", "timeout")
    _launch.known_only("spawn", kwargs, (*hosts, "join", "daemon", "start_method"))
    join, daemon = bool(kwargs.get("join", True)), bool(kwargs.get("daemon", False))
    method = str(kwargs.get("start_method") or "spawn")
    target = _launch.Target(fn, tuple(args), dict(kwargs_dict or {}), with_rank=True, around=_within)
    payload = _launch.prepare(target, method, in_place=nproc_per_node == 1 and join)

    def start(data: bytes) -> _native.Running:
        return _native.spawn_distributed(
            target,
            data,
            backend,
            nproc_per_node,
            _launch.int_of(kwargs, "nnodes", 1),
            _launch.int_of(kwargs, "node_rank", 0),
            str(kwargs.get("master_addr", "127.0.0.1")),
            _launch.int_of(kwargs, "master_port", 0),
            str(kwargs.get("init_method") or "env://"),
            _launch.seconds_of(kwargs.get("timeout", DEFAULT_TIMEOUT_S)),
            method,
            join,
            daemon,
        )

    context = _launch.begin(start, target, payload, daemon)
    assert context is not None
    if not join:
        return context.keep()
    context.join()
    return None


# Groups and collectives


def new_group(ranks: list[int], **kwargs: Any) -> Any:
    """Some of the ranks, for `group=`; called by all of them. Keywords: `backend`, `pg_options` (of torch's groups).

    Raises ConfigError for ranks out of range, doubled, or none.
    """
    _launch.known_only("new_group", kwargs, ("backend", "pg_options"))
    return _context().new_group(list(ranks), kwargs.get("backend"), kwargs.get("pg_options"))


def barrier() -> None:
    """Returns when all ranks have called it."""
    _context().barrier()


def _check_op(op: str) -> None:
    if op not in REDUCTIONS:
        raise ConfigError(f"unknown reduction '{op}'; there are: {', '.join(REDUCTIONS)}", "op")


def _tensor_of(number: float) -> torch.Tensor:
    """Of a number or a bool; numbers have 64 bits, as Python's."""
    return torch.tensor(number, dtype=torch.bool if isinstance(number, bool) else torch.float64)


# Whole numbers of Python have no bound, those of tensors have 64 bits. So they travel as objects: each member has those
# of all others, and what is made of them is exact, or an error on every member alike.


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


class _Whole(NamedTuple):
    """What a member contributes to `call`."""

    call: str
    number: int


def _check_calls(gathered: list[Any]) -> None:
    """Members that exchange objects may be in different calls: the backend sees no difference between these."""
    calls = [item.call if isinstance(item, _Whole) else "all_gather of objects" for item in gathered]
    if len(set(calls)) > 1:
        each = ", ".join(f"{call} in place {place}" for place, call in enumerate(calls))
        raise CollectiveError(f"the members made different calls: {each}", "mismatch")


def _whole_of_all(context: Context, call: str, number: int, members: Any) -> list[int]:
    gathered = context.all_gather_objects(_Whole(f"{call} of whole numbers", int(number)), members)
    _check_calls(gathered)
    return [item.number for item in gathered]


_WHOLE_REDUCTIONS: dict[str, Callable[[list[int]], int]] = {
    "SUM": sum,
    "PRODUCT": math.prod,
    "MIN": min,
    "MAX": max,
    "AND": functools.partial(functools.reduce, operator.and_),
    "OR": functools.partial(functools.reduce, operator.or_),
}


def _all_reduce_whole(context: Context, number: int, op: str, members: Any) -> int:
    if op not in _WHOLE_REDUCTIONS:
        raise UsageError(f"all_reduce: {op} of whole numbers makes no sense; pass a float")
    return _WHOLE_REDUCTIONS[op](_whole_of_all(context, f"all_reduce {op}", number, members))


def _all_gather_whole(context: Context, number: int, members: Any) -> torch.Tensor:
    numbers = _whole_of_all(context, "all_gather", number, members)
    for place, value in enumerate(numbers):
        if not -(2**63) <= value < 2**63:
            raise UsageError(
                f"all_gather: the number in place {place}, {value}, does not fit the 64 bits of the tensor that is "
                "returned; lists of numbers are gathered as objects"
            )
    return torch.tensor(numbers)


def all_reduce(tensor: torch.Tensor | Number, op: str = "SUM", group: Any = None) -> torch.Tensor | Number:
    """Of tensors of one shape and dtype, or numbers: SUM, AVG, PRODUCT, MIN, MAX, and AND and OR.

    Of whole numbers the result is exact, however large it is; a tensor's wraps as torch's does.
    group: a list of ranks, what new_group() returned, or None: all. A rank outside gets its own input back. Returns
    a new tensor of the input's shape, dtype and device, or a number of the input's kind.
    """
    _check_op(op)
    context = _context()
    members = context.group_of(group)
    if isinstance(tensor, (bool, int, float)):
        if not context.contains(members) or context.world_size() == 1:
            return tensor
        if _is_whole(tensor):
            return _all_reduce_whole(context, int(tensor), op, members)
        reduced: Number = context.all_reduce(_on(context, _tensor_of(tensor)), op, members).item()
        return reduced
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"all_reduce: a {type(tensor).__name__} cannot be reduced; tensors and numbers can")
    return context.all_reduce(tensor, op, members) if context.contains(members) else tensor


def _on(context: Context, tensor: torch.Tensor) -> torch.Tensor:
    """Of a number: nccl reaches what is on its device only."""
    return tensor.to(context.device()) if isinstance(context, _torch_context.TorchContext) else tensor


def all_gather(tensor: Any, group: Any = None) -> Any:
    """Of tensors of one shape and dtype: concatenated on dimension 0 (a 0-d one counts as one element).

    Of numbers: a tensor of shape (ranks,), int64, bool or float64. Of strings and of any other objects: a list, in the
    order of ranks; they travel by pickle. group: as in all_reduce(). Raises CollectiveError on every rank when
    shapes or kinds differ: it names them; UsageError on every rank when a whole number does not fit 64 bits.
    """
    context = _context()
    members = context.group_of(group)
    if not context.contains(members):
        return tensor
    if isinstance(tensor, torch.Tensor):
        return context.all_gather(tensor, members)
    if _is_whole(tensor):
        return _all_gather_whole(context, tensor, members)
    if isinstance(tensor, (bool, float)):
        return context.all_gather(_on(context, _tensor_of(tensor).reshape(1)), members)
    gathered = context.all_gather_objects(tensor, members)
    _check_calls(gathered)
    return gathered


def broadcast(tensor: Any, src: int = 0, safe_mode: bool = False) -> Any:
    """The tensor, number or string of rank `src`.

    The others pass a tensor of the same shape and dtype, or a number or string of the same kind; with safe_mode
    anything, None included, at the price of another collective. Whole numbers may be of any size.
    """
    context = _context()
    if not 0 <= src < context.world_size():
        raise UsageError(f"broadcast: there is no rank {src}, in a world of {context.world_size()}")
    if safe_mode:
        return _broadcast_safely(context, tensor, src)
    if isinstance(tensor, torch.Tensor):
        return context.broadcast(tensor, src)
    if isinstance(tensor, str):
        return context.broadcast_object(tensor, src)
    if _is_whole(tensor):
        return _whole_of_all(context, f"broadcast from rank {src}", tensor, context.group_of(None))[src]
    if isinstance(tensor, (bool, float)):
        return context.broadcast(_on(context, _tensor_of(tensor)), src).item()
    raise TypeError(
        f"broadcast: a {type(tensor).__name__} cannot be sent; tensors, numbers and strings can"
        + ("; only safe_mode finds out what will come" if tensor is None else "")
    )


def _broadcast_safely(context: Context, tensor: Any, src: int) -> Any:
    # The source tells first what will come, or that nothing can: nobody waits for what it cannot send then.
    header: tuple[str, Any] = ("nothing", None)
    if context.rank() == src:
        if isinstance(tensor, torch.Tensor):
            dense = tensor.layout == torch.strided
            header = ("tensor", (tensor.dtype, tuple(tensor.shape))) if dense else ("sparse", str(tensor.layout))
        elif isinstance(tensor, (bool, int, float, str)):
            header = ("value", tensor)
        else:
            header = ("nothing", type(tensor).__name__)
    kind, what = context.broadcast_object(header, src)
    if kind == "value":
        return what
    if kind == "nothing":
        raise UsageError(
            f"broadcast: the source, rank {src}, passed a {what}; tensors, numbers and strings can be sent"
        )
    if kind == "sparse":
        raise UsageError(
            f"broadcast: the source, rank {src}, passed a tensor of layout {what}; only dense ones can be sent"
        )
    dtype, shape = what
    mine = tensor if context.rank() == src else _on(context, torch.empty(shape, dtype=dtype))
    return context.broadcast(mine, src)


def reduce_scatter(tensor: torch.Tensor, op: str = "SUM", group: Any = None) -> torch.Tensor:
    """Block i of dimension 0, reduced, for rank i; dimension 0 is a multiple of the group's size."""
    _check_op(op)
    context = _context()
    members = context.group_of(group)
    return context.reduce_scatter(tensor, op, members) if context.contains(members) else tensor


def all_to_all(input: torch.Tensor, group: Any = None) -> torch.Tensor:
    """Block i of dimension 0 goes to rank i; its size is a multiple of the group's.

    With a backward pass: gradients take the same way back. Serial: the input.
    """
    context = _context()
    members = context.group_of(group)
    return context.all_to_all(input, members) if context.contains(members) else input


def send_object(value: Any, to: int) -> None:
    """Any object that pickles, to another rank, which calls receive_object()."""
    if isinstance(_context(), _torch_context.TorchContext):
        torch.distributed.send_object_list([value], dst=to)
    else:
        _native.dist_send_bytes(cloudpickle.dumps(value), to)


def receive_object(source: int) -> Any:
    """What rank `source` has sent. Blocks until it has."""
    if isinstance(_context(), _torch_context.TorchContext):
        box: list[Any] = [None]
        torch.distributed.recv_object_list(box, src=source)
        return box[0]
    return pickle.loads(_native.dist_receive_bytes(source))


# Some ranks only


def one_rank_only(rank: int = 0, with_barrier: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: the function runs on this rank; others get None. with_barrier: after it everyone waits for it."""

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
    """The body runs on this rank first, then on the others. `local`: on a rank of each host.

    They are let go on when what was done first has failed. Raises ConfigError (a ValueError) "rank should be between 0
    and N - 1, but given R".
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
