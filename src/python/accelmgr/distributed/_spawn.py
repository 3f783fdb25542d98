"""spawn() of accelmgr.distributed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from accelmgr import _native
from accelmgr._launch import options
from accelmgr._launch.processes import SpawnContext, begin, prepare
from accelmgr._launch.target import Target
from accelmgr.distributed._context import within

DEFAULT_TIMEOUT_S = 300.0


def spawn(
    backend: str,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs_dict: Mapping[str, Any] | None = None,
    nproc_per_node: int = 1,
    **kwargs: Any,
) -> SpawnContext | None:
    """Starts `nproc_per_node` processes in a context of `backend`; each calls `fn(local_rank, *args, **kwargs_dict)`.

    Keywords and defaults: `nnodes` (1), `node_rank` (0), `master_addr` (127.0.0.1), `master_port` (a free one; 2222
    with several nodes), `init_method` (`env://`), `timeout` (timedelta or seconds; 300), `join` (True), `daemon`
    (False), `start_method` (`spawn`; or `fork`, `forkserver`). Functions and arguments are pickled with cloudpickle,
    definitions of `__main__` included.

    Blocks until all processes have ended and returns None. With join=False it returns the SpawnContext at once. Raises
    ConfigError (a ValueError) for an unknown backend and for invalid options. Raises SpawnError, with rank and
    traceback, when a process fails; then the others are ended.
    """
    nodes = ("nnodes", "node_rank", "master_addr", "master_port", "init_method", "timeout")
    options.known_only("spawn", kwargs, (*nodes, "join", "daemon", "start_method"))
    join, daemon = bool(kwargs.get("join", True)), bool(kwargs.get("daemon", False))
    method = str(kwargs.get("start_method") or "spawn")
    target = Target(fn, tuple(args), dict(kwargs_dict or {}), with_rank=True, around=within)
    payload = prepare(target, method)

    def start(data: bytes) -> _native.Running:
        return _native.spawn_distributed(
            target,
            data,
            backend,
            nproc_per_node,
            options.int_of(kwargs, "nnodes", 1),
            options.int_of(kwargs, "node_rank", 0),
            str(kwargs.get("master_addr", "127.0.0.1")),
            options.int_of(kwargs, "master_port", 0),
            str(kwargs.get("init_method") or "env://"),
            options.seconds_of(kwargs.get("timeout", DEFAULT_TIMEOUT_S)),
            method,
            daemon,
        )

    context = begin(start, target, payload, daemon)
    assert context is not None
    if not join:
        return context.keep()
    context.join()
    return None
