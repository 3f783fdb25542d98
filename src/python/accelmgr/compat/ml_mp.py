"""ml.utils.mp: the same names, signatures and defaults, over accelmgr's processes and collectives.

    launch_subprocesses(train, MultiprocessConfig(world_size=2))

A bug of the original is fixed: on one machine local_world_size is the number of processes, not of devices.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Any, ParamSpec

import torch

from accelmgr import _native, distributed
from accelmgr._launch import refresh_environment
from accelmgr._launch.processes import begin, prepare
from accelmgr._launch.target import Target
from accelmgr.distributed import _context

__all__ = [
    "DEFAULT_PORT",
    "INFOALL",
    "MISSING",
    "MultiprocessConfig",
    "ParallelGroups",
    "all_to_all",
    "configure_logging",
    "default_backend",
    "get_distributed_backend",
    "init_and_run",
    "init_dist",
    "init_parallelism",
    "init_process_group_from_backend",
    "is_missing",
    "launch_subprocesses",
    "parallel_groups",
    "set_distributed_backend",
]

DEFAULT_PORT = 29500
INFOALL = logging.INFO + 1
"""Level of records that every rank logs; after configure_logging() rank 0 alone logs INFO."""
MISSING: Any = "???"
"""A value to be resolved, as omegaconf spells it."""

logging.addLevelName(INFOALL, "INFOALL")

P = ParamSpec("P")


@dataclasses.dataclass
class MultiprocessConfig:
    """The processes that train one model.

    Defaults of MISSING values: world_size: the number of GPUs, or 1. local_world_size: world_size if master_addr is a
    loopback address or there is no GPU, else the number of GPUs. master_port: a free port from 29500 on.
    """

    rank: int = -1
    local_rank: int = -1
    world_size: int = MISSING
    local_world_size: int = MISSING
    master_addr: str = "127.0.0.1"
    master_port: int = MISSING
    init_method: str = "env://"
    model_parallelism: int = 1
    pipeline_parallelism: int = 1
    backend: str | None = None
    model_parallel_backend: str | None = None
    pipeline_parallel_backend: str | None = None
    data_parallel_backend: str | None = None
    launch_method: str = "forkserver"

    @classmethod
    def resolve(cls, config: MultiprocessConfig) -> None:
        """Fills in the missing values. Raises ConfigError for invalid ones (degrees that do not divide the world)."""
        _resolved(config)

    def text(self) -> str:
        """`key = value` lines."""
        return _native_of(self).text()


def is_missing(config: MultiprocessConfig, name: str) -> bool:
    value = getattr(config, name)
    return value is None or value == MISSING


_OPTIONAL = ("world_size", "local_world_size", "master_port")


def _native_of(config: MultiprocessConfig) -> _native.MultiprocessConfig:
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(MultiprocessConfig)}
    values |= {name: None for name in _OPTIONAL if is_missing(config, name)}
    values |= {name: value or None for name, value in values.items() if name.endswith("backend")}
    return _native.MultiprocessConfig(**values)


def _resolved(config: MultiprocessConfig) -> _native.MultiprocessConfig:
    """Fills in `config`. If a free port was found, the returned object keeps it bound."""
    native = _native_of(config)
    native.resolve()
    for name in _OPTIONAL:
        setattr(config, name, getattr(native, name))
    return native


def configure_logging(rank: int | None = None, world_size: int | None = None) -> None:
    """Adds the rank to log records. Rank 0 alone logs records below WARNING; every rank logs those of level INFOALL.

    Does nothing if the root logger has handlers already.
    """
    root = logging.getLogger()
    if root.handlers:
        return
    handler = logging.StreamHandler()
    if rank is not None and world_size is not None and world_size > 1:
        handler.setFormatter(logging.Formatter(f"[{rank}/{world_size}] %(levelname)s %(name)s: %(message)s"))
        handler.addFilter(lambda record: rank == 0 or record.levelno == INFOALL or record.levelno >= logging.WARNING)
    else:
        handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    root.addHandler(handler)
    root.setLevel(logging.INFO)


def default_backend() -> str:
    """`nccl` with a GPU, else `shm`."""
    return _native.default_backend()


def get_distributed_backend() -> str:
    """$ACCELMGR_DISTRIBUTED_BACKEND, else $TORCH_DISTRIBUTED_BACKEND, else default_backend()."""
    return _native.get_distributed_backend()


def set_distributed_backend(backend: str) -> None:
    """Sets the backend of this process and of those that it starts. Raises ConfigError for one that is unavailable."""
    _native.set_distributed_backend(backend)
    refresh_environment()


def init_process_group_from_backend(backend: str | None = None) -> None:
    """Joins the process group that the environment describes, and checks it by an all_reduce.

    Blocks until all ranks have joined. Then torch.distributed is initialized too, with gloo unless the backend is nccl,
    until accelmgr.distributed.finalize(). Raises CollectiveError, which names the missing ranks, after the launcher's
    timeout or 300 s.
    """
    _native.init_process_group_from_backend(backend)
    _context.enter(torch_always=True)


def init_dist(
    rank: int,
    local_rank: int,
    world_size: int,
    local_world_size: int,
    master_addr: str,
    master_port: int,
    init_method: str,
    backend: str | None = None,
) -> None:
    """Sets the environment variables of these values, and joins as init_process_group_from_backend() does."""
    try:
        _native.init_dist(
            rank, local_rank, world_size, local_world_size, master_addr, master_port, init_method, backend
        )
    finally:
        refresh_environment()
    _context.enter(torch_always=True)


@dataclasses.dataclass(frozen=True)
class ParallelGroups:
    """The groups that this rank belongs to. Ranks are laid out [pipeline][data][model], model fastest."""

    model: distributed.Group
    pipeline: distributed.Group
    data: distributed.Group


def init_parallelism(
    model_parallelism: int = 1,
    pipeline_parallelism: int = 1,
    *,
    mp_backend: str | None = None,
    pp_backend: str | None = None,
    dp_backend: str | None = None,
) -> ParallelGroups:
    """Makes the groups. All ranks must call it. Raises ConfigError when the degrees do not divide the world."""
    return ParallelGroups(
        *_native.init_parallelism(model_parallelism, pipeline_parallelism, mp_backend, pp_backend, dp_backend)
    )


def parallel_groups() -> ParallelGroups:
    """The groups of the last init_parallelism(). Raises UsageError before the first one."""
    return ParallelGroups(*_native.parallel_groups())


@dataclasses.dataclass
class _Rank:
    """Calls the function of a rank that has joined, with the rank's logging and with torch.distributed."""

    world_size: int
    leaves: bool
    """After the call the rank leaves the process group of torch."""

    def __call__(self, rank: int, call: Callable[[], Any]) -> None:
        configure_logging(rank=rank, world_size=self.world_size)
        if self.leaves:
            _context.within(rank, call, torch_always=True)
        else:
            _context.enter(torch_always=True)
            call()


def init_and_run(func: Callable[P, None], cfg: MultiprocessConfig, *args: P.args, **kwargs: P.kwargs) -> None:
    """Calls init_dist(), init_parallelism() and `func`, in this process."""
    native = _resolved(cfg)
    target = Target(func, args, kwargs, around=_Rank(cfg.world_size, leaves=False))
    prepare(target, "spawn", in_place=True)
    try:
        _native.run_multiprocess(target, native)
    finally:
        refresh_environment()


def launch_subprocesses(
    func: Callable[P, None],
    cfg: MultiprocessConfig,
    setup: Callable[[], None] | None = None,
    rank_offset: int = 0,
    *args: P.args,
    **kwargs: P.kwargs,
) -> None:
    """Starts this machine's local_world_size processes of a world of world_size. Each calls `func(*args, **kwargs)`.

    setup: each process calls it first. rank_offset: the rank of this machine's first process. With world size 1 it
    warns, and calls `func` in this process, without `setup`. Blocks until all processes have ended; Ctrl-C ends them.
    Raises ConfigError for an invalid configuration. Raises SpawnError (a RuntimeError), with the rank and its
    traceback, when a process fails; then the others are ended.
    """
    native = _resolved(cfg)
    in_place = cfg.world_size == 1
    if in_place:
        cfg.rank = cfg.local_rank = 0
    target = Target(func, args, kwargs, setup=setup, around=_Rank(cfg.world_size, leaves=True))
    payload = prepare(target, cfg.launch_method, in_place)
    context = begin(
        lambda data: _native.start_multiprocess(target, data, native, setup is not None, rank_offset), target, payload
    )
    if context is not None:
        context.join()


def all_to_all(input: torch.Tensor, group: Any = None) -> torch.Tensor:
    """Sends block i of dimension 0 to rank i of the group (None: all). Has a backward pass. In serial: the input."""
    return distributed.all_to_all(input, group)
