"""Python functions as launched processes: what spawn() of every origin is made of."""

from __future__ import annotations

import atexit
import dataclasses
import os
import pickle
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import cloudpickle

from accelmgr import _native
from accelmgr._child import embed
from accelmgr._payload import _culprit, _memfd
from accelmgr.errors import ConfigError, SpawnError, UsageError

LARGE_BYTES = 16 * 1024 * 1024
"""From here on arguments travel in a memory file: a message has 64 MiB at most."""


@dataclasses.dataclass
class Target:
    """What each process calls: `function(*args, **kwargs)`, or `function(rank, *args, **kwargs)`."""

    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    with_rank: bool = False
    setup: Callable[[], Any] | None = None
    around: Callable[[int, Callable[[], Any]], Any] | None = None
    """Called with the rank and what calls the function."""
    is_forked: bool = False
    result: Any = None
    """Of a call in place: the object itself."""

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise UsageError(f"spawn: {self.function!r} is a {type(self.function).__name__}, which cannot be called")

    def call(self, rank: int) -> Any:
        def call() -> Any:
            return self.function(*((rank,) if self.with_rank else ()), *self.args, **self.kwargs)

        return self.around(rank, call) if self.around is not None else call()


class Payload:
    """A pickled target; it lasts as long as processes may ask for it."""

    def __init__(self, target: Target) -> None:
        try:
            data = cloudpickle.dumps(target)
        except Exception as error:
            parts = {"function": target.function, "setup": target.setup, "kwargs": target.kwargs}
            parts |= {f"args[{index}]": argument for index, argument in enumerate(target.args)}
            what = next((_culprit(part, name) for name, part in parts.items() if not _is_picklable(part)), "the target")
            raise UsageError(
                f"spawn: {what} cannot be pickled: {type(error).__name__}: {error}; "
                "the start method 'fork' copies it as it is"
            ) from error
        self._fd = -1
        where = ""
        if len(data) > LARGE_BYTES:
            self._fd = _memfd("accelmgr-target", len(data))
            with os.fdopen(os.dup(self._fd), "wb") as file:
                file.write(data)
            where, data = f"{os.getpid()}:{self._fd}", b""
        # By position in a plain pickle: the modules that the target needs may be found by this path only.
        self.data = pickle.dumps(([os.path.abspath(path) for path in sys.path], where, data))

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _is_picklable(value: Any) -> bool:
    try:
        cloudpickle.dumps(value)
    except Exception:
        return False
    return True


def refresh_environment() -> None:
    """os.environ as it is in C++: a launch sets it there."""
    now = dict(_native.environment())
    for name in set(os.environb) - set(now):
        del os.environb[name]
    for name, value in now.items():
        if os.environb.get(name) != value:
            os.environb[name] = value


class SpawnContext:
    """Processes that were started together. Ended, when nobody joins them: at the end of this program.

    One thread at a time joins; terminate() may be called from another one meanwhile.
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
        if not self._in_place:
            _contexts.add(self)

    def join(self, timeout: float | None = None) -> bool:
        """Waits until all have ended (True), or for `timeout` seconds (False).

        Raises SpawnError when one has failed, after the others have been ended. Ctrl-C ends all of them.
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
        """For who gets it without having asked to wait. Before that, an interruption ends all."""
        self._kept = True
        self._running.keep()
        return self

    def terminate(self) -> None:
        """Ends all that still run: TERM, then KILL; their own children too. Bounded; no failure."""
        self._running.terminate()
        self._over = True
        self._end()

    def _end(self) -> None:
        _contexts.discard(self)
        if self._payload is not None:
            self._payload.close()

    def pids(self) -> list[int]:
        return self._running.pids()

    @property
    def results(self) -> list[Any]:
        """What the functions returned, by local rank; None of those that have not."""
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
            print(f"accelmgr: of processes that nobody joined: {error}", file=sys.stderr)


atexit.register(_end_contexts)
os.register_at_fork(after_in_child=_contexts.clear)  # They are the parent's.


def text_of(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, tuple)):
        return ",".join(text_of(item) for item in value)
    return str(value)


def prepare(target: Target, start_method: str, in_place: bool) -> Payload | None:
    """What is to be pickled for other processes; None where the object itself gets there."""
    embed()
    target.is_forked = start_method == "fork"
    if in_place or target.is_forked:
        return None
    return Payload(target)


def begin(
    start: Callable[[bytes], _native.Running | None], target: Target, payload: Payload | None, daemon: bool = False
) -> SpawnContext | None:
    """`start` of the extension module, and what is to be done about it."""
    sys.stdout.flush()
    sys.stderr.flush()  # What is buffered would come again from each forked process.
    try:
        running = start(payload.data if payload is not None else b"")
    except BaseException:
        if payload is not None:
            payload.close()
        raise
    finally:
        refresh_environment()
    return None if running is None else SpawnContext(running, target, payload, daemon)


def start(
    target: Target, *, nprocs: int, join: bool, daemon: bool, start_method: str | None, options: Mapping[str, Any]
) -> SpawnContext:
    """Starts `nprocs` processes (-1: as many as there are devices). One that is to be joined is called in place."""
    method = "spawn" if start_method is None else start_method
    texts = {name: text_of(value) for name, value in options.items() if value is not None}
    texts |= {"nprocs": str(nprocs), "join": text_of(join), "daemon": text_of(daemon), "start_method": method}
    payload = prepare(target, method, in_place=nprocs == 1 and join)
    context = begin(lambda data: _native.spawn(target, data, texts, target.setup is not None), target, payload, daemon)
    assert context is not None
    return context if join else context.keep()


def seconds_of(timeout: Any, name: str = "timeout") -> float:
    """Of a number of seconds or a datetime.timedelta."""
    if hasattr(timeout, "total_seconds"):
        return float(timeout.total_seconds())
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
        raise ConfigError(f"{name} is a {type(timeout).__name__}; it must be a timedelta or a number of seconds", name)
    return float(timeout)


def int_of(options: Mapping[str, Any], name: str, default: int) -> int:
    value = options.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name} is {value!r}; it must be a whole number", name)
    return value


def known_only(function: str, options: Mapping[str, Any], known: Sequence[str]) -> None:
    for name in options:
        if name not in known:
            raise TypeError(f"{function}() got an unexpected argument '{name}'; it takes {', '.join(known)}")
