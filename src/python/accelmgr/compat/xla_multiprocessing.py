"""torch_xla.distributed.xla_multiprocessing: the same names, signatures and defaults, over accelmgr's processes.

    import accelmgr.compat.xla_multiprocessing as xmp

    xmp.spawn(train, args=(config,), nprocs=2)

What torch_xla reads from XRT_* variables has names of its own here: ACCELMGR_WORKERS, ACCELMGR_TPU_CONFIG,
ACCELMGR_TPU_NUM_DEVICES, ACCELMGR_GPU_NUM_DEVICES, ACCELMGR_WORLD_SIZE (hosts), ACCELMGR_LOCAL_WORKER.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from accelmgr import _launch, _native
from accelmgr._launch import SpawnContext

__all__ = ["MpModelWrapper", "MpSerialExecutor", "SpawnContext", "spawn"]

Result = TypeVar("Result")

_CONFIGURATION = (
    "ACCELMGR_WORKERS",
    "ACCELMGR_TPU_CONFIG",
    "ACCELMGR_TPU_NUM_DEVICES",
    "ACCELMGR_GPU_NUM_DEVICES",
    "ACCELMGR_LOCAL_WORKER",
)


def _is_configured() -> bool:
    return any(os.environ.get(name) for name in _CONFIGURATION)


def spawn(
    fn: Callable[..., Any],
    args: tuple[Any, ...] = (),
    nprocs: int | None = None,
    join: bool = True,
    daemon: bool = False,
    start_method: str = "spawn",
) -> SpawnContext | None:
    """`nprocs` processes, each of which calls `fn(index, *args)`; index: of the process in the world.

    nprocs: any number up to the configured devices; None: all of them, or 1 when nothing is configured. One process
    with `join` is this one. start_method: spawn (by cloudpickle), fork, forkserver.

    Returns None when all have ended, or, with join=False, what torch.multiprocessing.spawn returns: join(timeout),
    pids(). Raises ConfigError (a ValueError) for what cannot be started, before anything is; SpawnError, with rank
    and traceback, when a process fails: it prints `Exception in device=...` and ends with exit code 17, the others
    are ended. Ctrl-C ends all of them.
    """
    target = _launch.Target(fn, tuple(args), with_rank=True)
    count = nprocs if nprocs is not None else (-1 if _is_configured() else 1)
    context = _launch.start(target, nprocs=count, join=join, daemon=daemon, start_method=start_method, options={})
    if not join:
        return context
    context.join()
    return None


_made: Counter[str] = Counter()


def _name_of_place(kind: str, depth: int) -> str:
    """The same for the object that another process of the launch makes at the same place of the program."""
    frame = sys._getframe(depth + 1)
    place = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
    _made[kind + place] += 1
    return f"{kind} {hashlib.sha256(f'{place} {_made[kind + place]}'.encode()).hexdigest()[:24]}"


class MpSerialExecutor:
    """Runs functions of the processes of one launch one after the other: one process at a time.

    The death of the process that is inside lets the next one in. Works under every start method, as a global or
    passed on.
    """

    def __init__(self) -> None:
        self._name = _name_of_place("serial", 1)
        self._executor = _native.SerialExecutor(self._name)

    def __reduce__(self) -> tuple[Any, ...]:
        return _serial_executor, (self._name,)

    def run(self, fn: Callable[[], Result]) -> Result:
        """What `fn()` returns or raises. Raises SessionError after 300 s of waiting: it names who is inside."""
        result: Result = self._executor.run(fn)
        return result


def _serial_executor(name: str) -> MpSerialExecutor:
    executor = MpSerialExecutor.__new__(MpSerialExecutor)
    executor._name = name
    executor._executor = _native.SerialExecutor(name)
    return executor


class MpModelWrapper:
    """A model built once, before the processes are forked, and moved to each one's device, one process at a time.

    With start_method='fork' the memory of the host's weights exists once.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._turn = _serial_executor(_name_of_place("model", 1))

    def to(self, device: torch.device | str) -> torch.nn.Module:
        """The same model every time, on `device`. Raises SessionError after 300 s of waiting for the others."""
        return self._turn.run(lambda: self._model.to(device))
