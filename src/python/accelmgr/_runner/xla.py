# Runs in: runners.
"""torch_xla, and the XLA device of a runner.

The manager imports torch_xla before it forks its fork server, so that runners need not: an import takes seconds, but
starts no thread. Runners start torch_xla's runtime, which does not outlive a fork. The host does neither.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import os
import sys
from collections.abc import Mapping
from typing import Any

import torch

from accelmgr._runner.device import FORKED, KEY, check_autograd
from accelmgr.errors import ConfigError

TESTED = "torch==2.9.0 torch_xla==2.9.0"  # Each torch_xla is built for one torch.

OF_A_TPU_POD = ("TPU_PROCESS_ADDRESSES", "TPU_PROCESS_PORT", "CLOUD_TPU_TASK_ID")
"""Variables that make processes one world. Each runner is a world of one device, and gradients meet in the session."""


def _check_installed() -> None:
    """Raises ConfigError unless this interpreter has a torch_xla for its torch. Imports nothing."""
    advice = f"{sys.executable} -m pip install {TESTED}"
    try:
        found = importlib.metadata.version("torch_xla")
    except importlib.metadata.PackageNotFoundError:
        text = f"{KEY} is xla, but {sys.executable} has no torch_xla; a torch_xla is built for one torch: {advice}"
        raise ConfigError(text, KEY) from None
    if found.split(".")[:2] != torch.__version__.split(".")[:2]:
        raise ConfigError(
            f"{KEY} is xla, but {sys.executable} has torch_xla {found} and torch {torch.__version__}; a torch_xla is "
            f"built for one torch: {advice}",
            KEY,
        )


def imported() -> Any:
    """torch_xla. Raises ConfigError if it cannot be imported."""
    _check_installed()
    os.environ.setdefault("PJRT_SELECT_DEFAULT_DEVICE", "0")  # torch_xla would log a warning that it has selected one.
    try:
        return importlib.import_module("torch_xla")
    except Exception as error:  # A library that does not fit raises OSError or ImportError.
        found = importlib.metadata.version("torch_xla")
        raise ConfigError(
            f"{KEY} is xla, but {sys.executable} cannot import torch_xla {found} with torch {torch.__version__} "
            f"({type(error).__name__}: {error}); {sys.executable} -m pip install {TESTED}",
            KEY,
        ) from error


def preload() -> None:
    """Imports torch_xla, if it can be imported; what fails is said when the model is made."""
    with contextlib.suppress(ConfigError):
        imported()


def variables_of(kind: str, rank: int, threads: int, present: Mapping[str, str]) -> dict[str, str | None]:
    """The environment variables by which the runner of `rank` has one device of `kind`. None: to be removed.

    Variables in `present` decide how a CPU computes. The chip of a TPU that a runner has follows from its rank alone.
    """
    if kind == "TPU":
        return {
            "PJRT_DEVICE": "TPU",
            "TPU_VISIBLE_CHIPS": str(rank),
            "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1",
            "TPU_PROCESS_BOUNDS": "1,1,1",
            **dict.fromkeys(OF_A_TPU_POD),
        }
    wanted = {"PJRT_DEVICE": kind}
    if kind == "CPU":
        wanted["PJRT_NPROC"] = present.get("PJRT_NPROC", str(threads))  # Threads of XLA's computations.
        wanted["CPU_NUM_DEVICES"] = "1"
    return dict(wanted)


def open_device(rank: int, threads: int) -> torch.device:
    """Starts the XLA runtime of this process with the device of `rank`.

    Raises ConfigError if there is none, or if the process was forked from one where the runtime ran.
    """
    torch_xla = imported()
    if torch_xla._XLAC._xla_runtime_is_initialized():
        raise ConfigError(
            f"{KEY} is xla, but torch_xla's runtime ran already in the process that runner {rank} was forked from, and "
            f"{FORKED}",
            KEY,
        )
    tpu = importlib.import_module("torch_xla._internal.tpu")
    kind = os.environ.get("PJRT_DEVICE") or ("TPU" if tpu.num_available_chips() > 0 else "CPU")
    for name, value in variables_of(kind, rank, threads, os.environ).items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    try:
        device: torch.device = torch_xla.device()
        torch.zeros(1).to(device).cpu()
    except Exception as error:
        raise ConfigError(
            f"{KEY} is xla, but runner {rank} cannot open its device (PJRT_DEVICE={kind}): "
            f"{type(error).__name__}: {error}",
            KEY,
        ) from error
    check_autograd(rank, device, "xla")
    return device
