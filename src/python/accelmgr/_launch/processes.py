"""Processes that run a target: starts them, joins them, ends them."""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import signal
import sys
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from accelmgr import _native
from accelmgr._launch import refresh_environment
from accelmgr._launch.options import text_of
from accelmgr._launch.target import Payload, Target
from accelmgr._process.child import embed
from accelmgr.errors import SpawnError


class Process:
    """One process of a launch, with the names of multiprocessing.Process."""

    def __init__(self, running: _native.Running, index: int, pid: int, daemon: bool) -> None:
        self._running = running
        self._index = index
        self.pid = self.ident = pid
        self.name = f"SpawnProcess-{index}"
        self.daemon = daemon

    def _state(self) -> _native.ProcessState:
        return self._running.processes()[self._index]

    @property
    def exitcode(self) -> int | None:
        """None while the process runs; -N: signal N ended it."""
        return self._state().exit_code

    @property
    def trace(self) -> str | None:
        """The traceback of its failure; None if it runs or did not end by an exception."""
        return self._state().trace

    @property
    def sentinel(self) -> int:
        """A descriptor that is readable when the process has ended. It is valid as long as the context."""
        return self._state().pidfd

    def is_alive(self) -> bool:
        return self.exitcode is None

    def join(self, timeout: float | None = None) -> None:
        """Waits for this process alone. Its failure is raised by the context's join()."""
        self._running.wait(self._index, timeout)

    def terminate(self) -> None:
        """Sends SIGTERM to this process. The context's join() then raises if the process fails."""
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        """As terminate(), with SIGKILL."""
        self._send(signal.SIGKILL)

    def _send(self, number: signal.Signals) -> None:
        state = self._state()
        if state.exit_code is None:
            with contextlib.suppress(ProcessLookupError):  # It has just ended.
                signal.pidfd_send_signal(state.pidfd, number)


class SpawnContext:
    """Processes that were started together.

    At the end of this program, processes that were not joined are ended; after keep(), unless they are daemons, the
    program waits for them instead. One thread at a time may join; another one may call terminate() meanwhile.
    """

    def __init__(self, running: _native.Running, target: Target, payload: Payload | None, daemon: bool) -> None:
        self._running = running
        self._target = target
        self._payload = payload
        self._in_place = running.pids() == [os.getpid()]
        self._daemon = daemon
        self._over = False
        self._kept = False
        self._error: SpawnError | None = None
        self._processes = [Process(running, index, pid, daemon) for index, pid in enumerate(running.pids())]
        if not self._in_place:
            _contexts.add(self)

    def join(self, timeout: float | None = None) -> bool:
        """Waits for all processes. Returns True when all have ended, False after `timeout` seconds.

        Raises SpawnError (`rank`, `exit_code`, `signal`, `trace`) when one has failed, after the others were ended.
        Ctrl-C ends all of them.
        """
        try:
            self._over = self._running.join(timeout) or self._over
        except SpawnError as error:
            self._over = True
            self._error = error
            raise
        except BaseException:
            self.terminate()
            raise
        finally:
            if self._over:
                self._end()
        return self._over

    def keep(self) -> SpawnContext:
        """Marks the context as handed to the caller (join=False). Before that, an interruption ends all processes."""
        self._kept = True
        self._running.keep()
        return self

    def terminate(self) -> None:
        """Ends all processes that still run, and their children: TERM, then KILL. Bounded; raises no SpawnError."""
        self._running.terminate()
        self._over = True
        self._end()

    @property
    def processes(self) -> list[Process]:
        """The processes, by local rank, with the names of multiprocessing.Process."""
        return self._processes

    def _end(self) -> None:
        _contexts.discard(self)
        if self._payload is not None:
            self._payload.close()

    def pids(self) -> list[int]:
        return self._running.pids()

    @property
    def results(self) -> list[Any]:
        """What the functions returned, by local rank; None for those that have not returned."""
        if self._in_place:
            return [self._target.result]
        return [None if data is None else pickle.loads(data) for data in self._running.results()]


_contexts: weakref.WeakSet[SpawnContext] = weakref.WeakSet()


def _end_contexts() -> None:
    for context in list(_contexts):
        try:
            if context._daemon or not context._kept:
                context.terminate()
            else:
                context.join()
        except SpawnError as error:
            print(f"accelmgr: a launch that was never joined failed: {error}", file=sys.stderr)


atexit.register(_end_contexts)
os.register_at_fork(after_in_child=_contexts.clear)  # The processes belong to the parent.


def prepare(target: Target, start_method: str, in_place: bool = False) -> Payload | None:
    """The payload to send; None if the process that calls the target has it already (in place, or forked)."""
    embed()
    target.is_forked = start_method == "fork"
    if in_place or target.is_forked:
        return None
    return Payload(target)


def begin(
    start: Callable[[bytes], _native.Running | None],
    target: Target,
    payload: Payload | None,
    daemon: bool = False,
    kind: type[SpawnContext] = SpawnContext,
) -> SpawnContext | None:
    """Calls `start`, a function of the extension module, and wraps its processes. Closes the payload if it fails."""
    sys.stdout.flush()
    sys.stderr.flush()  # Else each forked process would write the buffered text again.
    try:
        running = start(payload.data if payload is not None else b"")
    except BaseException:
        if payload is not None:
            payload.close()
        raise
    finally:
        refresh_environment()
    return None if running is None else kind(running, target, payload, daemon)


def start(
    target: Target,
    *,
    nprocs: int,
    join: bool,
    daemon: bool,
    start_method: str | None,
    options: Mapping[str, Any],
    in_place: bool = False,
    kind: type[SpawnContext] = SpawnContext,
) -> SpawnContext:
    """Starts `nprocs` processes (-1: one for each device). in_place: a single process is this one; needs `join`."""
    method = "spawn" if start_method is None else start_method
    texts = {name: text_of(value) for name, value in options.items() if value is not None}
    texts |= {"nprocs": str(nprocs), "join": text_of(in_place), "daemon": text_of(daemon), "start_method": method}
    payload = prepare(target, method, in_place=in_place)
    has_setup = target.setup is not None
    context = begin(lambda data: _native.spawn(target, data, texts, has_setup), target, payload, daemon, kind)
    assert context is not None
    return context if join else context.keep()
