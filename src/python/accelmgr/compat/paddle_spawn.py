"""paddle.distributed.spawn: the same names, signatures and defaults, over accelmgr's processes.

context = spawn(train, args=(True,), nprocs=2, join=False, backend="auto")
while not context.join(1.0): ...
"""

from __future__ import annotations

import queue
import warnings
from collections.abc import Callable
from typing import Any

from accelmgr._launch.processes import Process, SpawnContext, start
from accelmgr._launch.target import Target

__all__ = ["Errors", "MultiprocessContext", "Process", "Results", "spawn"]

LOOK_S = 0.05
"""How often a queue that waits for its process looks at the others."""

_DEPRECATED = ("selected_devices", "started_port", "cluster_node_ips", "node_ip", "use_paddlecloud")


class Results:
    """A queue of one process, which holds what its function returned."""

    def __init__(self, context: MultiprocessContext, process: Process) -> None:
        self._context = context
        self._process = process
        self._taken = False

    def empty(self) -> bool:
        return self._taken or self._process.exitcode != 0

    def get(self) -> Any:
        """Blocks until this process has ended, and returns the result. Raises as MultiprocessContext.join() does."""
        while self._process.is_alive() and not any(process.exitcode for process in self._context.processes):
            self._process.join(LOOK_S)
        while self._process.exitcode != 0 and not self._context.join():
            pass  # It raises, unless the processes were asked to end.
        self._taken = True
        return self._context.results[self._context.processes.index(self._process)]


class Errors:
    """A queue of one process, which holds the traceback of its failure."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._taken = False

    def empty(self) -> bool:
        return self._taken or not self._process.trace

    def get(self) -> str:
        """Blocks until this process has ended. Raises queue.Empty when it did not end by an exception."""
        self._process.join()
        if self._process.trace is None:
            raise queue.Empty
        self._taken = True
        return self._process.trace


class MultiprocessContext(SpawnContext):
    """The launched processes. One thread at a time may use it."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.return_queues = [Results(self, process) for process in self.processes]
        self.error_queues = [Errors(process) for process in self.processes]

    @property
    def sentinels(self) -> dict[int, int]:
        """Descriptors of the processes that still run, for multiprocessing.connection.wait(), with their indices."""
        return {process.sentinel: i for i, process in enumerate(self.processes) if process.is_alive()}


def spawn(
    func: Callable[..., Any],
    args: tuple[Any, ...] | list[Any] = (),
    nprocs: int = -1,
    join: bool = True,
    daemon: bool = False,
    **options: Any,
) -> MultiprocessContext:
    """Starts `nprocs` processes; each calls `func(*args)`. -1: one per visible GPU, or per core.

    Options: `start_method` (spawn; or fork, forkserver), `ips` ("192.168.0.16,192.168.0.17": all nodes, this one
    included), `gpus` ("0,1": absolute ids, one for each process), `xpus`, `backend` (auto), `print_config`. Deprecated,
    with a DeprecationWarning: selected_devices, started_port, cluster_node_ips, node_ip, use_paddlecloud=False. The
    processes get their rank and the collectives from accelmgr.distributed.

    Blocks until all processes have ended, unless join=False. Raises ConfigError (a ValueError) for an unknown option
    (it names the nearest one), for devices that do not exist, and for options that contradict each other. Raises
    SpawnError when a process fails; then the others are ended.
    """
    for name in options:
        if name in _DEPRECATED:
            warnings.warn(
                f"the option {name} of spawn() is deprecated; its documentation names the replacement",
                DeprecationWarning,
                stacklevel=2,
            )
    texts = dict(options)
    method = texts.pop("start_method", None)
    target = Target(func, tuple(args))
    context = start(
        target,
        nprocs=nprocs,
        join=join,
        daemon=daemon,
        start_method=method,
        options=texts,
        kind=MultiprocessContext,
    )
    assert isinstance(context, MultiprocessContext)
    while join and not context.join():
        pass
    return context
