"""The process group of torch.distributed beside a context of the engine.

Programs for ignite.distributed call torch.distributed after initialize() or in a spawned function. So with a backend
that torch has (gloo, nccl) there is a process group of torch, which ends with the context; the collectives of
accelmgr.distributed stay with the engine. With every backend MASTER_ADDR and MASTER_PORT are set, so that the program
may make a process group itself where there is none. Programs for ml.utils.mp find one with every backend.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from accelmgr.distributed._engine import EngineContext

logger = logging.getLogger("accelmgr.distributed")

ADDRESS, PORT = "MASTER_ADDR", "MASTER_PORT"


def _free_port() -> int:
    """A port that no process uses. It is below those that the kernel gives to clients, so that it is still free when
    the program serves there."""
    for port in random.SystemRandom().sample(range(16384, 32768), 100):  # Leaves the program's generator alone.
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
    raise OSError("100 ports from 16384 to 32767 are in use")


def _store(host: str, port: int, is_master: bool, timeout_s: float | None) -> Any:
    options: dict[str, Any] = {} if timeout_s is None else {"timeout": timedelta(seconds=timeout_s)}
    return dist.TCPStore(host, port, is_master=is_master, wait_for_workers=False, **options)  # type: ignore[attr-defined]


def _made(context: EngineContext, backend: str, store: Any, timeout_s: float | None) -> Any:
    timeout = None if timeout_s is None else timedelta(seconds=timeout_s)  # None: torch's own.
    dist.init_process_group(backend, timeout=timeout, store=store, rank=context.rank(), world_size=context.world_size())
    return dist.group.WORLD


def _on_all(context: EngineContext, here: bool) -> bool:
    """Whether it is true on all ranks. Also a barrier."""
    return all(context.all_gather_objects(here, None))


def _warn(why: object) -> None:
    """Only warns of what fails here: the collectives of the engine do not need it."""
    logger.warning("torch.distributed cannot be initialized (%s); the collectives of accelmgr can", why)


def _tried(call: Callable[..., Any], *args: Any) -> Any:
    """What `call` returns; None, and a warning, if it fails."""
    try:
        return call(*args)
    except Exception as error:
        return _warn(error)


class ProcessGroup:
    def __init__(self) -> None:
        self._world: Any = None
        self._set: list[str] = []

    def begin(self, context: EngineContext, timeout_s: float | None = None, *, always: bool = False) -> None:
        """Makes a process group; an existing one stays. always: also with a backend that torch does not have.

        Requires: all ranks call it.
        """
        if not dist.is_available():
            return
        backend = context.backend()
        if always and backend != "nccl":
            backend = "gloo"
        wanted = backend in ("gloo", "nccl") and dist.is_backend_available(backend)
        everywhere = _on_all(context, wanted and not dist.is_initialized())
        store: Any = None
        meeting: tuple[str, str, int] | str = ""
        if context.rank() == 0:
            try:
                host = "127.0.0.1" if context.nnodes() == 1 else os.environ.get(ADDRESS) or socket.gethostname()
                store = _store(host, 0, True, timeout_s) if everywhere else None
                meeting = host, os.environ.get(PORT) or str(_free_port()), 0 if store is None else store.port
            except Exception as error:  # The other ranks wait for the answer, whatever it is.
                meeting = f"rank 0 finds no place for it: {error}"
        if context.world_size() > 1:
            meeting = context.broadcast_object(meeting, 0)
        if isinstance(meeting, str):
            return _warn(meeting)
        host, master_port, store_port = meeting
        for name, value in ((ADDRESS, host), (PORT, master_port)):
            if not os.environ.get(name):
                os.environ[name] = value
                self._set.append(name)
        if store_port == 0:
            return
        # All ranks see if one fails: none waits for it, or has a process group that others lack.
        if store is None:
            store = _tried(_store, host, store_port, False, timeout_s)
        if not _on_all(context, store is not None):
            return
        self._world = _tried(_made, context, backend, store, timeout_s)
        # Here a rank also waits for ranks that still connect to it: it may end the process group at once.
        if not _on_all(context, self._world is not None):
            self.end()

    def end(self) -> None:
        """Destroys the process group of begin(), if it still exists."""
        world, self._world = self._world, None
        if world is not None and dist.is_initialized() and dist.group.WORLD is world:
            dist.destroy_process_group()

    def forget_address(self) -> None:
        """Removes the variables that begin() has set."""
        for name in self._set:
            os.environ.pop(name, None)
        self._set.clear()


process_group = ProcessGroup()
