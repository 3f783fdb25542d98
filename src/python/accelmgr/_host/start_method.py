# Runs in: the host.
"""How the processes of a manager come to be: whether this process may be forked, and why not."""

from __future__ import annotations

import ctypes
import logging
import os
import sys
import threading

import torch

from accelmgr.errors import ConfigError

logger = logging.getLogger("accelmgr")

START_METHODS = ("auto", "fork", "forkserver", "spawn")
UNFORKABLE_DEVICES = ("xla", "accelerator")
"""Values of runners.device whose libraries nobody here has seen to survive a fork."""


def check(name: str) -> None:
    if name not in START_METHODS:
        text = f"start_method is '{name}'; it must be one of {', '.join(START_METHODS)}"
        raise ConfigError(text, "start_method")


def other_threads() -> list[str]:
    """The names of this process's threads, but for the first one."""
    names = []
    for task in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{task}/comm") as file:
                if int(task) != os.getpid():
                    names.append(file.read().strip())
        except OSError:  # The thread has ended.
            continue
    return sorted(names)


def say_what_forks_lack() -> None:
    """Warns of threads for which a fork may wait."""
    known = (threading.main_thread(), threading.current_thread())
    if names := [thread.name for thread in threading.enumerate() if thread not in known]:
        logger.warning(
            "runners, and the process that reads the data, are forks of this process and have none of its other "
            "threads (%s): what waits there for one of them waits for ever. Let the model or the dataset start its own",
            ", ".join(names),
        )


CUDA_ERROR_NOT_INITIALIZED = 3


def _has_initialized_cuda() -> bool:
    """Whether any library has done so. torch.cuda.is_available() does, but torch.cuda.is_initialized() stays False."""
    try:
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError:  # Nobody has loaded it.
        return False
    code: int = driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int()))
    return code != CUDA_ERROR_NOT_INITIALIZED


def why_not_forked(device: str) -> str:
    """Why a fork of this process could not compute with `device`; empty if it can."""
    if device in UNFORKABLE_DEVICES:
        return f"runners.device is {device}"
    if _has_initialized_cuda():
        return (
            "this process has initialized CUDA; torch.cuda.is_available() does, except with "
            "PYTORCH_NVML_BASED_CUDA_CHECK=1 in the environment"
        )
    if any(name in sys.modules for name in ("torch_xla", "_XLAC")):
        return "this process has loaded torch_xla"
    if any(name.startswith("pt_autograd") for name in other_threads()):
        return (
            "backward() was called in this process, or a function of torch.compile, and autograd has started threads "
            "for the devices that torch sees"
        )
    return ""


def check_fork(device: str) -> None:
    """Raises ConfigError for a fork that might hang: torch_xla's runtime has threads, and locks that they hold."""
    xla = getattr(sys.modules.get("torch_xla"), "_XLAC", None)
    if device == "xla" and xla is not None and xla._xla_runtime_is_initialized():
        raise ConfigError(
            "start_method is 'fork', but torch_xla's runtime has run in this process, and it does not outlive a fork: "
            "leave start_method out, or pass 'spawn'",
            "start_method",
        )


DRIVERS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")


def stay_forkable() -> None:
    """Before a fork: makes autograd decide, where there is no device, that it needs no threads for devices.

    It decides once, in the first backward(). torch.compile makes it believe that there are eight GPUs, where there are
    none, and this process could not be forked again.
    """
    fakes = getattr(sys.modules.get("torch._subclasses.fake_tensor"), "FakeTensorMode", None)
    if any(getattr(fakes, counts, None) for counts in ("cache_hits", "cache_misses", "cache_bypasses")):
        return  # torch.compile has done so already.
    if any(map(os.path.exists, DRIVERS)):
        return  # To ask for the accelerator might use it.
    accelerator = torch.accelerator.current_accelerator() if hasattr(torch, "accelerator") else None
    if accelerator is None or accelerator.type == "cuda":
        torch.ones((), requires_grad=True).backward()  # type: ignore[no-untyped-call]


def chosen(asked: str, device: str) -> tuple[str, str]:
    """The start method for `asked`, and why it is not `fork`; empty if it is, or was asked for by name."""
    if asked != "auto":
        return asked, ""
    why = why_not_forked(device)
    return ("spawn", why) if why else ("fork", "")
