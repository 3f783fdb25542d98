"""The Python part of a launched process. The extension module calls it."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import io
import os
import pickle
import signal
import sys
import threading
import traceback
import weakref

import torch

from accelmgr._launch import refresh_environment
from accelmgr._launch.main_module import Main, dumps, run_top
from accelmgr._launch.target import Target
from accelmgr._memory.memfd import open_memfd
from accelmgr._serialization.describe import encodable
from accelmgr.errors import UsageError

MOST_FRAMES = 16
END_S = 30.0
"""The most time for functions that are registered to be called at the end of a process."""
_main: Main = "", ""
"""The user's script, if this process has run its top."""
_begun = False  # All atexit functions are this process's own.
_is_forked = False


def load(data: bytes) -> Target:
    """Unpickles the target that a Payload has pickled."""
    global _main, _begun
    _begun = True
    sys.path[:], sys.argv[:], _main, where, pickled = pickle.loads(data)
    run_top(_main)
    if where:
        pid, fd = where.split(":")
        try:
            memory = open_memfd(pid, fd, "accelmgr-target")
        except OSError:
            raise UsageError(f"process {pid}, which launched this one, has ended") from None
        with os.fdopen(memory, "rb") as file:
            target: Target = pickle.load(file)
            return target
    loaded: Target = pickle.loads(pickled)
    return loaded


def describe(error: BaseException) -> tuple[str, str, str]:
    """Type, message and traceback of an error: the inner MOST_FRAMES frames, without those of this package."""
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    own = os.path.dirname(os.path.dirname(__file__))  # The folder of the package accelmgr.
    frames = error.__traceback__
    while frames is not None and frames.tb_next is not None and frames.tb_frame.f_code.co_filename.startswith(own):
        frames = frames.tb_next
    try:
        what = str(error)
        trace = "".join(traceback.format_exception(kind, error, frames, limit=-MOST_FRAMES))
    except Exception as second:  # The error cannot be printed.
        what, trace = f"(its message cannot be read: {type(second).__name__})", ""
    return name, encodable(what), encodable(trace)


def _forget_parent() -> None:
    """Drops the functions that the parent has registered for its own end: a fork must not call them."""
    atexit._clear()
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False
    weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]
    if (process := sys.modules.get("multiprocessing.process")) is not None:
        process._children = set()  # type: ignore[attr-defined]
    if (util := sys.modules.get("multiprocessing.util")) is not None:
        util._finalizer_registry.clear()
        atexit.register(util._exit_function)


def _begin(target: Target) -> None:
    global _begun, _is_forked
    refresh_environment()
    if target.is_forked and not _begun:
        _is_forked = True
        _forget_parent()
    _begun = True
    if target.is_forked:
        torch.set_num_threads(1)  # A fork lacks the threads of the parent's pool, and would wait for them.
    elif (threads := os.environ.get("OMP_NUM_THREADS", "")).isdigit() and int(threads) > 0:
        torch.set_num_threads(int(threads))  # A fork of the forkserver has inherited another number.


def set_up(target: Target, rank: int, in_place: bool) -> None:
    if not in_place:
        _begin(target)
    if target.setup is not None:
        target.setup()


def run(target: Target, rank: int, in_place: bool) -> bytes | None:
    """Calls the target. Returns the pickled result, or None; in place it stores the result in the target."""
    if in_place:
        refresh_environment()
        target.result = target.call(rank)
        return None
    _begin(target)
    try:
        result = _result(target, rank)
        # Waits for the user's threads.
        threading._shutdown()  # type: ignore[attr-defined]  # Not after a failure, which is reported at once.
        return result
    finally:
        _flush()


def end(rank: int, code: int) -> None:
    """Does what the interpreter does at its end: calls what is registered with atexit, and flushes open files.

    Ends this process if that hangs.
    """
    if not _begun:
        return

    def give_up() -> None:
        print(
            f"accelmgr: rank {rank} is ended: what it has registered to be called at its end (atexit) has not returned "
            f"within {END_S:g} s:",
            file=sys.__stderr__,
        )
        _flush()
        faulthandler.dump_traceback(sys.__stderr__.fileno() if sys.__stderr__ is not None else 2)
        os._exit(code or 1)

    timer = threading.Timer(END_S, give_up)
    timer.daemon = True
    timer.start()
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, END_S + 1)  # Kills, also if the interpreter's lock is held.
    try:
        atexit._run_exitfuncs()
    except BaseException:
        traceback.print_exc()
    _flush()
    if not _is_forked:  # What the parent has left unflushed is the parent's.
        _flush_files()
    timer.cancel()
    signal.setitimer(signal.ITIMER_REAL, 0)


def _result(target: Target, rank: int) -> bytes | None:
    try:
        result = target.call(rank)
        return None if result is None else dumps(result, _main)
    except KeyboardInterrupt:
        return None  # The launcher has asked it to end.
    except SystemExit as exit:
        code = _exit_code(exit)
        if code:
            end(rank, code)
            os._exit(code)
        return None


def _exit_code(exit: SystemExit) -> int:
    if exit.code is None or isinstance(exit.code, int):
        return exit.code or 0
    print(exit.code, file=sys.stderr)
    return 1


def _flush_files() -> None:
    for found in gc.get_objects():
        if issubclass(type(found), io.IOBase):
            with contextlib.suppress(Exception):
                found.flush()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            pass
