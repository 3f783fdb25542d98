"""The context of accelmgr.distributed: which one it is, and the ranks and names that it has."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from accelmgr import _native
from accelmgr._launch import options
from accelmgr.distributed import _torch
from accelmgr.distributed._engine import EngineContext
from accelmgr.distributed._process_group import process_group
from accelmgr.distributed._torch import TorchContext
from accelmgr.errors import UsageError

Context = EngineContext | TorchContext

logger = logging.getLogger("accelmgr.distributed")

has_native_dist_support: bool = torch.distributed.is_available()
has_xla_support: bool = False
has_hvd_support: bool = False

_of_engine = EngineContext()
_of_torch = _torch.context
_initialized = False
"""True after initialize(): the engine's context is used, even if torch has a process group, too."""


def current() -> Context:
    return _of_torch if not _initialized and _torch.is_present() else _of_engine


def is_available() -> bool:
    """Always True: every installation has collectives."""
    return True


def sync(temporary: bool = False) -> None:
    """Looks for the context again. Call it after the program made or ended a context by hand.

    temporary: every getter looks for it again.
    """
    _native.dist_sync(temporary)


def device() -> torch.device:
    """`cpu`, or `cuda:local_rank` under nccl."""
    return current().device()


def backend() -> str | None:
    """The name of the backend: `shm`, `gloo`, `nccl`; None in serial."""
    return current().backend()


def available_backends() -> tuple[str, ...]:
    """The backends that initialize() and spawn() can use here."""
    return tuple(_native.dist_available_backends())


def model_name() -> str:
    """`serial`, `native-dist` (torchrun or torch.distributed made the context), or `accelmgr-dist`."""
    context = current()
    return context.name if isinstance(context, TorchContext) else _native.dist_model_name()


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
"""One class for each name that model_name() can return."""


def get_world_size() -> int:
    """The number of ranks; 1 in serial."""
    return current().world_size()


def get_rank() -> int:
    """The rank of this process; 0 in serial."""
    return current().rank()


def get_local_rank() -> int:
    """The rank among the processes of this machine; 0 in serial. Raises UsageError while it is not known."""
    return current().local_rank()


def get_nproc_per_node() -> int:
    """The number of processes on this machine; 1 in serial. Raises UsageError while it is not known."""
    return current().nproc_per_node()


def get_nnodes() -> int:
    """The number of nodes; 1 in serial. Raises UsageError while it is not known."""
    return current().nnodes()


def get_node_rank() -> int:
    """The number of this node; 0 in serial. Raises UsageError while it is not known."""
    return current().node_rank()


def hostname() -> str:
    return _native.dist_hostname()


def set_local_rank(index: int) -> None:
    """Sets what get_local_rank() returns, for a context that was made by hand. A negative index raises UsageError."""
    _native.dist_set_local_rank(index)
    _torch.set_local_rank(index)


def initialize(backend: str, **kwargs: Any) -> None:
    """Joins the other processes; blocks until all have joined.

    backend: one of available_backends(), or `auto`: shm on one node, gloo over several. Keywords: `timeout` (timedelta
    or seconds) limits the rendezvous and every collective; default: the launcher's, or 300 s. `init_method`: `env://`
    (the default), `tcp://HOST:PORT` or `file:///PATH`. `rank`, `world_size`: default: from the environment.

    Raises ConfigError (a ValueError) for an unknown backend (it names the available ones) and for values that
    contradict each other; CollectiveError, cause `timeout`, which names the missing ranks; UsageError when there is a
    context already.

    With a backend that torch has (gloo, nccl) torch.distributed is initialized too, until finalize(). With every
    backend MASTER_ADDR and MASTER_PORT are set afterwards, for a process group that the program makes itself.
    """
    options.known_only("initialize", kwargs, ("timeout", "init_method", "rank", "world_size"))
    if _torch.is_present():
        raise UsageError(
            f"initialize(): torch.distributed is initialized already ({_of_torch.backend()}, rank {_of_torch.rank()} "
            f"of {_of_torch.world_size()}), and these functions use it; finalize() ends it"
        )
    timeout = kwargs.get("timeout")
    timeout_s = None if timeout is None else options.seconds_of(timeout)
    _native.dist_initialize(
        backend,
        timeout_s,
        kwargs.get("init_method") or "",
        kwargs.get("rank"),
        kwargs.get("world_size"),
    )
    enter(timeout_s)


def enter(timeout_s: float | None = None, *, torch_always: bool = False) -> None:
    """Uses the engine's context, which this process has joined, even if torch has a process group. Makes one of torch.

    torch_always: also with a backend that torch does not have.
    """
    global _initialized
    _initialized = True
    process_group.begin(_of_engine, timeout_s, always=torch_always)


def finalize() -> None:
    """Leaves the context; this process is serial again. Destroys a process group of torch.distributed."""
    global _initialized
    process_group.end()
    current().finalize()
    _initialized = False
    _torch.set_local_rank(None)


def show_config() -> None:
    """Logs backend, device, ranks and sizes of this process, at level info."""
    context = current()
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


def within(local_rank: int, call: Callable[[], Any], *, torch_always: bool = False) -> Any:
    """Calls `call` in the engine's context, as enter() makes it."""
    global _initialized
    before = _initialized
    try:
        enter(torch_always=torch_always)
        result = call()
        process_group.end()  # After an error the other ranks may not be there to end it.
        return result
    finally:
        process_group.forget_address()
        _initialized = before
