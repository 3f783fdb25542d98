"""The Python part of a launched process. The extension module calls it."""

from __future__ import annotations

import os
import pickle
import sys
import threading
import traceback

import torch

from accelmgr._common.describe import encodable
from accelmgr._common.memfd import open_memfd
from accelmgr._launch import refresh_environment
from accelmgr._launch.main_module import Main, dumps, run_top
from accelmgr._launch.target import Target
from accelmgr.errors import UsageError

MOST_FRAMES = 16
_main: Main = "", ""
"""The user's script, if this process has run its top."""


def load(data: bytes) -> Target:
    """Unpickles the target that a Payload has pickled."""
    global _main
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


def _begin(target: Target) -> None:
    refresh_environment()
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


def _result(target: Target, rank: int) -> bytes | None:
    try:
        result = target.call(rank)
        return None if result is None else dumps(result, _main)
    except KeyboardInterrupt:
        return None  # The launcher has asked it to end.
    except SystemExit as exit:
        code = _exit_code(exit)
        if code:
            _flush()
            os._exit(code)
        return None


def _exit_code(exit: SystemExit) -> int:
    if exit.code is None or isinstance(exit.code, int):
        return exit.code or 0
    print(exit.code, file=sys.stderr)
    return 1


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            pass
