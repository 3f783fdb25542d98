# Runs in: all processes.
"""Settings of torch and Python that belong to a process. The host's settings also hold in processes that work for it.

They are sent at the start, and again before a step if they have changed.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.process import current_process
from typing import Any, NamedTuple

import torch
from torch.utils import deterministic

from accelmgr._serialization.pickling import is_picklable

Values = dict[str, Any]


class Setting(NamedTuple):
    read: Callable[[], Any]
    """Reads the value in the host. None: this build of torch lacks the setting, or it is not set; it is not sent."""
    write: Callable[[Any], object]


class Runner:
    """What a runner adds to the settings of the host."""

    threads = 0
    """The most threads with which the runner computes. 0: the configuration sets the number, whatever the host has."""
    deterministic = False
    autocast: dict[str, torch.dtype]
    """The dtype of the autocast in which the host calls step(), by the type of the device."""

    def __init__(self) -> None:
        self.autocast = {}


runner = Runner()

# Threads

_threads_at_import = torch.get_num_threads()


def _usual_threads() -> set[int]:
    cores = len(os.sched_getaffinity(0))
    named = [os.environ.get(name, "") for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")]
    return {_threads_at_import, cores, cores // 2, *(int(value) for value in named if value.isdigit())}


_usual = _usual_threads()


def _read_threads() -> int | None:
    threads = torch.get_num_threads()
    return threads if threads != _threads_at_import or threads not in _usual else None


def _write_threads(threads: int) -> None:
    if runner.threads:
        torch.set_num_threads(min(threads, runner.threads))


# Others that have no plain getter and setter


def _read_default_device() -> str:
    context = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    return context.device.type if context is not None else ""


def _read_deterministic() -> tuple[int, bool]:
    mode = torch.get_deterministic_debug_mode()
    return mode, mode > 0 and bool(deterministic.fill_uninitialized_memory)  # type: ignore[attr-defined]


def write_deterministic(value: tuple[int, bool]) -> None:
    mode, fills = value
    torch.set_deterministic_debug_mode(max(mode, 1 if runner.deterministic else 0))
    deterministic.fill_uninitialized_memory = fills  # type: ignore[attr-defined]


_smallest = 5e-324


def _read_autocast() -> dict[str, torch.dtype]:
    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    return {kind: torch.get_autocast_dtype(kind) for kind in kinds}


def _write_filters(filters: list[Any]) -> None:
    warnings.filters[:] = filters  # type: ignore[index]
    warnings._filters_mutated()  # type: ignore[attr-defined]


def _write_key(key: bytes) -> None:
    current_process().authkey = key


_backends, _cuda = torch.backends, torch.backends.cuda

SETTINGS: dict[str, Setting] = {
    "default dtype": Setting(torch.get_default_dtype, torch.set_default_dtype),
    "default device": Setting(_read_default_device, lambda kind: torch.set_default_device(kind or None)),
    "float32 matmul precision": Setting(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "deterministic algorithms": Setting(_read_deterministic, write_deterministic),
    "flush denormal": Setting(lambda: _smallest * 1.0 == 0.0, torch.set_flush_denormal),
    "anomaly detection": Setting(
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda value: torch.autograd.set_detect_anomaly(*value),
    ),
    "warn always": Setting(torch.is_warn_always_enabled, torch.set_warn_always),
    "print options": Setting(
        lambda: dict(vars(torch._tensor_str.PRINT_OPTS)),
        lambda options: torch.set_printoptions(**options),  # type: ignore[no-untyped-call]
    ),
    "warnings filters": Setting(lambda: list(warnings.filters), _write_filters),
    "autocast": Setting(_read_autocast, functools.partial(setattr, runner, "autocast")),
    "autocast cache": Setting(torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
    "threads": Setting(_read_threads, _write_threads),
    "sdp.flash": Setting(_cuda.flash_sdp_enabled, _cuda.enable_flash_sdp),
    "sdp.mem_efficient": Setting(_cuda.mem_efficient_sdp_enabled, _cuda.enable_mem_efficient_sdp),
    "sdp.math": Setting(_cuda.math_sdp_enabled, _cuda.enable_math_sdp),
    "sdp.cudnn": Setting(_cuda.cudnn_sdp_enabled, _cuda.enable_cudnn_sdp),
    "sdp.fp16_bf16_reduction": Setting(
        _cuda.fp16_bf16_reduction_math_sdp_allowed, _cuda.allow_fp16_bf16_reduction_math_sdp
    ),
    "recursion limit": Setting(sys.getrecursionlimit, sys.setrecursionlimit),
    "sharing strategy": Setting(torch.multiprocessing.get_sharing_strategy, torch.multiprocessing.set_sharing_strategy),
    "key of multiprocessing": Setting(lambda: bytes(current_process().authkey), _write_key),
    "mha fastpath": Setting(_backends.mha.get_fastpath_enabled, _backends.mha.set_fastpath_enabled),
}

_ATTRIBUTES: dict[str, tuple[Any, str]] = {
    "cudnn": (_backends.cudnn, "enabled benchmark benchmark_limit deterministic allow_tf32"),
    "mkldnn": (_backends.mkldnn, "enabled deterministic allow_tf32"),
    "matmul": (
        _cuda.matmul,
        "allow_fp16_reduced_precision_reduction allow_bf16_reduced_precision_reduction allow_fp16_accumulation",
    ),
    "opt_einsum": (_backends.opt_einsum, "enabled strategy"),
    "quantized": (_backends.quantized, "engine"),
}
"""Settings that are attributes of their owner."""

SETTINGS |= {
    f"{group}.{name}": Setting(functools.partial(getattr, owner, name), functools.partial(setattr, owner, name))
    for group, (owner, names) in _ATTRIBUTES.items()
    for name in names.split()
}


OF_WORDS = ("print options", "warn always", "warnings filters")
"""Settings that change no number."""
OF_RUNNER = ("deterministic algorithms", "autocast", "autocast cache", "threads")
"""Settings that a runner combines with its own, or that only runners have."""


def _works(setting: Setting) -> bool:
    try:
        setting.read()
    except Exception:  # An older torch, or a build without the library.
        return False
    return True


SETTINGS = {name: setting for name, setting in SETTINGS.items() if _works(setting)}


class _Held(threading.local):
    values: Values | None = None


_held = _Held()


@contextlib.contextmanager
def held(values: Values) -> Iterator[None]:
    """In this thread current() returns `values`: torch has some settings for each thread, such as autocast."""
    _held.values = values
    try:
        yield
    finally:
        _held.values = None


def current() -> Values:
    """The settings of this process."""
    if _held.values is not None:
        return _held.values
    values = {}
    for name, (read, _) in SETTINGS.items():
        with contextlib.suppress(RuntimeError):  # torch refuses to tell an older setting where a newer one was set.
            values[name] = read()
    return values


def changed(before: Values, now: Values) -> Values:
    return {name: value for name, value in now.items() if name not in before or before[name] != value}


def sendable(values: Values) -> Values:
    """Without filters of warnings that cannot be pickled."""
    if "warnings filters" not in values:
        return values
    return values | {"warnings filters": [entry for entry in values["warnings filters"] if is_picklable(entry)]}


def apply(values: Values) -> None:
    """In a process that computes or reads for the host."""
    for name, value in values.items():
        if name not in SETTINGS or value is None or (name not in OF_RUNNER and SETTINGS[name].read() == value):
            continue  # Writing an unchanged value takes milliseconds for some settings, and raises for a frozen one.
        SETTINGS[name].write(value)
