"""paddle.distributed.spawn: the same names, signatures and defaults, over accelmgr's processes.

    context = spawn(train, args=(True,), nprocs=2, join=False, backend="auto")
    while not context.join(1.0): ...
"""

from __future__ import annotations

import contextlib
import os
import signal
import warnings
import weakref
from collections.abc import Callable
from typing import Any

from accelmgr import _launch
from accelmgr.errors import SpawnError

__all__ = ["MultiprocessContext", "Process", "Results", "spawn"]

_DEPRECATED = ("selected_devices", "started_port", "cluster_node_ips", "node_ip", "use_paddlecloud")


class Process:
    """One of the launched processes, as multiprocessing.Process says it."""

    def __init__(self, context: MultiprocessContext, index: int, pid: int, daemon: bool) -> None:
        self._context = context
        self._index = index
        self.pid = pid
        self.name = f"SpawnProcess-{index}"
        self.daemon = daemon
        self._pidfd = -1
        with contextlib.suppress(ProcessLookupError):  # It has ended already.
            self._pidfd = os.pidfd_open(pid)
            weakref.finalize(self, os.close, self._pidfd)

    @property
    def exitcode(self) -> int | None:
        """None while it runs, as far as join() knows; -N: signal N killed it."""
        return self._context._exitcodes[self._index]

    def is_alive(self) -> bool:
        """Whether join() has not seen its end."""
        return self.exitcode is None

    def terminate(self) -> None:
        """Asks this process to end; join() raises what comes of it."""
        if self.is_alive() and self.pid != os.getpid() and self._pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):  # It has ended, and join() has not seen it.
                signal.pidfd_send_signal(self._pidfd, signal.SIGTERM)


class Results:
    """Of one process: what its function returned, once."""

    def __init__(self, context: MultiprocessContext, index: int) -> None:
        self._context = context
        self._index = index
        self._taken = False

    def empty(self) -> bool:
        return self._taken or self._context._exitcodes[self._index] != 0

    def get(self) -> Any:
        """Waits until the processes have ended; raises what MultiprocessContext.join() does."""
        while not self._context.join():
            pass
        self._taken = True
        return self._context.results[self._index]


class MultiprocessContext:
    """The launched processes; one thread at a time."""

    def __init__(self, context: _launch.SpawnContext, daemon: bool) -> None:
        self._context = context
        self._exitcodes: list[int | None] = [None] * len(context.pids())
        self.processes = [Process(self, index, pid, daemon) for index, pid in enumerate(context.pids())]
        self.return_queues = [Results(self, index) for index in range(len(self.processes))]

    def join(self, timeout: float | None = None) -> bool:
        """True when all have ended, False when some run still after `timeout` seconds (None: as long as it takes).

        Raises SpawnError when one has failed, after the others have been ended: `rank`, `exit_code`, `signal`, `trace`.
        """
        try:
            over = self._context.join(timeout)
        except SpawnError as error:
            self._exitcodes = [code if code is not None else -int(signal.SIGTERM) for code in self._exitcodes]
            if error.rank >= 0:  # In the world; each host has as many.
                failed = error.rank % len(self._exitcodes)
                self._exitcodes[failed] = -error.signal if error.signal else error.exit_code
            raise
        if over:
            self._exitcodes = [0 if code is None else code for code in self._exitcodes]
        return over

    def terminate(self) -> None:
        """Ends all that still run; bounded."""
        self._context.terminate()
        self._exitcodes = [code if code is not None else -int(signal.SIGTERM) for code in self._exitcodes]

    def pids(self) -> list[int]:
        return self._context.pids()

    @property
    def results(self) -> list[Any]:
        """What the functions returned, by local rank; None of those that have not."""
        return self._context.results


def spawn(
    func: Callable[..., Any],
    args: tuple[Any, ...] | list[Any] = (),
    nprocs: int = -1,
    join: bool = True,
    daemon: bool = False,
    **options: Any,
) -> MultiprocessContext:
    """`nprocs` processes, each of which calls `func(*args)`; -1: the visible GPUs, or the cores.

    Options: `start_method` (spawn; fork, forkserver), `ips` ("192.168.0.16,192.168.0.17": all hosts, this one's among
    them), `gpus` ("0,1": absolute ids, one a process), `xpus`, `backend` (auto), `print_config`. Deprecated, with a
    DeprecationWarning: selected_devices, started_port, cluster_node_ips, node_ip, use_paddlecloud. In a process
    accelmgr.distributed says its rank and has the collectives.

    Returns when all have ended, unless join=False. Raises ConfigError (a ValueError) for an option that is not known
    (it names the nearest), devices that are not there, or options that contradict each other; SpawnError when a
    process fails: the others are ended.
    """
    for name in options:
        if name in _DEPRECATED:
            warnings.warn(
                f"the option {name} of spawn() is deprecated; its documentation says what took its place",
                DeprecationWarning,
                stacklevel=2,
            )
    texts = dict(options)
    method = texts.pop("start_method", None)
    target = _launch.Target(func, tuple(args))
    context = MultiprocessContext(
        _launch.start(target, nprocs=nprocs, join=join, daemon=daemon, start_method=method, options=texts), daemon
    )
    while join and not context.join():
        pass
    return context
