"""torch_xla.distributed.xla_multiprocessing: the same names, signatures and defaults, over accelmgr's processes.

    import accelmgr.compat.xla_multiprocessing as xmp

    xmp.spawn(train, args=(config,), nprocs=2)

These variables replace the XRT_* variables of torch_xla: ACCELMGR_WORKERS, ACCELMGR_TPU_CONFIG,
ACCELMGR_TPU_NUM_DEVICES, ACCELMGR_GPU_NUM_DEVICES, ACCELMGR_WORLD_SIZE (nodes), ACCELMGR_LOCAL_WORKER.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from accelmgr import _native
from accelmgr._launch.processes import SpawnContext, start
from accelmgr._launch.target import Target

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
    """Starts `nprocs` processes; each calls `fn(index, *args)`, where index is its number in the world.

    nprocs: at most the number of configured devices. None: all devices, or 1 when none is configured. nprocs=1 with
    `join` calls `fn` in this process. start_method: spawn (fn and args are pickled with cloudpickle), fork, forkserver.

    Blocks until all processes have ended and returns None. With join=False it returns at once, as
    torch.multiprocessing.spawn does, an object with join(timeout) and pids(). Raises ConfigError (a ValueError) for
    invalid arguments, before it starts a process. A process that fails prints `Exception in device=...` and ends with
    exit code 17; the others are ended, and SpawnError has its rank and traceback. Ctrl-C ends all of them.
    """
    target = Target(fn, tuple(args), with_rank=True)
    count = nprocs if nprocs is not None else (-1 if _is_configured() else 1)
    context = start(
        target,
        nprocs=count,
        join=join,
        daemon=daemon,
        start_method=start_method,
        options={},
        in_place=count == 1 and join,
    )
    if not join:
        return context
    context.join()
    return None


_made: Counter[str] = Counter()


def _name_of_place(kind: str, depth: int) -> str:
    """A name for an object: the same in each process of the launch that makes it at the same place of the program."""
    frame = sys._getframe(depth + 1)
    place = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
    _made[kind + place] += 1
    return f"{kind} {hashlib.sha256(f'{place} {_made[kind + place]}'.encode()).hexdigest()[:24]}"


class MpSerialExecutor:
    """Runs functions of the processes of one launch one at a time.

    When a process dies while it runs its function, the next one goes on. Works with every start method, as a global
    variable or as an argument.
    """

    def __init__(self) -> None:
        self._name = _name_of_place("serial", 1)
        self._executor = _native.SerialExecutor(self._name)

    def __reduce__(self) -> tuple[Any, ...]:
        return _serial_executor, (self._name,)

    def run(self, fn: Callable[[], Result]) -> Result:
        """Calls `fn()` and returns its result. Raises SessionError, which names the running process, after 300 s."""
        result: Result = self._executor.run(fn)
        return result


def _serial_executor(name: str) -> MpSerialExecutor:
    executor = MpSerialExecutor.__new__(MpSerialExecutor)
    executor._name = name
    executor._executor = _native.SerialExecutor(name)
    return executor


class MpModelWrapper:
    """A model that is built once, before the fork. The processes move it to their devices one at a time.

    With start_method='fork' the weights exist once in CPU memory.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._turn = _serial_executor(_name_of_place("model", 1))

    def to(self, device: torch.device | str) -> torch.nn.Module:
        """Returns the one model, on `device`. Raises SessionError after it has waited 300 s for the others."""
        return self._turn.run(lambda: self._model.to(device))
