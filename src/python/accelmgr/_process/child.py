# Runs in: an interpreter that accelmgr executes, or has forked.
"""Entry points of an interpreter that accelmgr executes: manager, fork server, service, process of spawn().

begin_forked() is the entry point of a forked process.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import threading
from typing import Any

from accelmgr import _native
from accelmgr._process import lost_threads, thread_locals
from accelmgr.errors import ConfigError, DataError, Error, ModelError

LAUNCHED = ("--accelmgr-child", "--accelmgr-zygote")
"""Processes of spawn(): what they compute is the user's, by the user's settings."""
FORKED_OBJECTS: dict[str, dict[str, Any]] = {}
"""Model, dataset, collate_fn and options that a forked manager has from the host, by their payload's path.

`forget_values()` takes the memory of the parameters away, unless the session has it.
"""

_embedded = False
_is_ours = False  # Whether this process is a manager, a fork server or a runner, and no host.


def main(arguments: list[str]) -> None:
    """Gives this process the role in the arguments.

    command_line() has disabled the garbage collector, which finds nothing while torch is imported, and takes a sixth of
    that time.
    """
    gc.enable()
    embed()
    _leave_host()
    if arguments[0] not in LAUNCHED:  # Those end as programs do.
        _print_lines()
    _native.take_role(arguments)


def _leave_host() -> None:
    global _is_ours
    _is_ours = True
    gc.freeze()  # The forks share all present objects. A collection that visits them would copy their pages in each.
    os.register_at_fork(after_in_child=_default_signals)


def begin_forked() -> None:
    """Called in each manager and runner that C++ has forked, when the interpreter knows of the fork."""
    lost_threads.renew()
    thread_locals.take_over()
    _print_lines()
    if (util := sys.modules.get("multiprocessing.util")) is not None:  # As in a process of multiprocessing.
        util._finalizer_registry.clear()
        util._run_after_forkers()  # Proxies, for instance, must not share a connection.
    if not _is_ours:
        _leave_host()
        thread = threading.Thread(target=_take_locks)  # This thread forks runners, so it must not compute.
        thread.start()
        thread.join()


def print_pending() -> None:
    """Called before a fork: what the script has printed would be printed by the fork, too."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # It is None, or was closed.
            stream.flush()


def _print_lines() -> None:
    """What user code prints goes out with each line: these processes end without the interpreter, or are killed."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def _take_locks() -> None:
    """Takes the locks that computing takes. If another thread of the host held one at the fork, it is never released:
    this hangs, and the host forks another process. It does not call backward(): with GPUs that initializes CUDA and
    starts a thread for each, and forks of this process could compute no gradient.
    """
    import torch

    torch.default_generator.get_state()
    torch.rand(2)
    square = torch.ones(8, 8)
    torch.nn.functional.conv1d((square @ square)[None], torch.ones(8, 8, 3))
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].get_state()


def forget_values() -> None:
    """Called in a manager and in its fork server: copies of the host's pages would live as long as these processes."""
    for objects in FORKED_OBJECTS.values():
        objects["forget_values"]()


def _default_signals() -> None:
    """Manager and runners ignore the signals that end a job; these signals must end workers that a dataset forks."""
    for number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def serve(arguments: list[str]) -> None:
    """What `accelmgr serve` executes for models or data in Python. The arguments are those of _native.serve()."""
    configuration, socket, group, http, token_file, stop_timeout_s, file, *settings = arguments
    gc.enable()
    embed()
    _leave_host()
    try:
        _native.serve(
            configuration,
            socket,
            int(group) if group else None,
            http,
            token_file,
            float(stop_timeout_s),
            file,
            settings,
        )
    except (ConfigError, ModelError, DataError) as error:
        print(f"accelmgr: {error}", file=sys.stderr)
        sys.exit(2)
    except Error as error:
        print(f"accelmgr: {error}", file=sys.stderr)
        sys.exit(1)


def embed() -> None:
    """Tells the extension module how to run this interpreter again. Only the first call of a process does anything."""
    global _embedded
    if not _embedded:
        _native.embed(command_line())
        _embedded = True
        if (script := sys.modules.get("__mp_main__")) is not None:  # In a process that multiprocessing has started.
            import cloudpickle

            cloudpickle.register_pickle_by_value(script)


def command_line() -> list[str]:
    """The command that runs this interpreter again and calls main()."""
    import subprocess

    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    # OpenBLAS would start threads when it is imported; the manager must have one thread to fork its fork server.
    program = f"""import gc, os, sys
gc.disable()
if sys.argv[1] == "--accelmgr-forkserver":  # Executes this interpreter for each rank. It needs no torch.
    from importlib import util
    spec = util.spec_from_file_location("_native", {_native.__file__!r})
    native = util.module_from_spec(spec)
    spec.loader.exec_module(native)
    native.embed(sys.orig_argv[:-1])
    native.take_role(sys.argv[1:])
sys.path[:] = {[os.path.abspath(entry) for entry in sys.path]!r}
sys.argv[1] in {LAUNCHED!r} or os.environ.update(OPENBLAS_NUM_THREADS="1")
from accelmgr._process.child import main
main(sys.argv[1:])
"""
    return [sys.executable, *flags, "-c", program]
