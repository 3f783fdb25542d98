"""Runners on a CUDA device that is a fake: torch computes on the CPU, at once, and copies run late.

The library tests/support/fake_gpu.cpp takes the place of CUDA's runtime. Ranks with even numbers execute as late as
possible, those with odd numbers in threads. With `nccl` it takes the place of NCCL too, and all execute in threads.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from device_runners import start as start_on_device
from torch.utils._python_dispatch import TorchDispatchMode

import accelmgr
from accelmgr import _cuda, _native

TESTS = pathlib.Path(_native.__file__).parents[2] / "tests"
LIBRARY = TESTS / "support/fake_cuda_home/lib64/libcudart.so.13"
NOT_READY = 600
ILLEGAL_ADDRESS, ASSERT = 700, 710
AcceleratorError: type[Exception] = getattr(torch, "AcceleratorError", RuntimeError)  # torch 2.8 and newer have it.
TEXTS = {ILLEGAL_ADDRESS: "an illegal memory access was encountered", ASSERT: "device-side assert triggered"}

# Where a manager looks for GPUs, it finds those of a fake driver, if the build has one.
os.environ["LD_LIBRARY_PATH"] = str(TESTS / "support/fake_driver")
os.environ["FAKE_DRIVER_GPUS"] = "8"
os.environ["FAKE_DRIVER_MACHINE"] = str(os.getpid())  # Managers claim GPUs; those of other tests are others.


class NoReads(TorchDispatchMode):
    """Refuses what makes a host wait for a device: a value that it reads, or a shape that depends on values."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(function).startswith(("aten._local_scalar_dense", "aten.nonzero", "aten.equal", "aten.is_nonzero")):
            raise RuntimeError(f"{function} reads from the device")
        return function(*args, **(kwargs or {}))


class FakeCuda(_cuda.Cuda):
    """Takes the place of torch.cuda in a runner."""

    current: FakeCuda
    library = str(LIBRARY)
    nccl = "no library"  # That of torch would be called with memory that is no GPU's.

    def __init__(self, rank: int) -> None:
        self.device = torch.device("cpu")
        self.runtime = ctypes.CDLL(str(LIBRARY))
        self.runtime.fake_cuda_start(int(rank % 2 == 0 and self.nccl != str(LIBRARY)), ctypes.c_uint64(rank))
        self._streams = [self._made("cudaStreamCreateWithFlags", 1) for _ in range(3)]
        self._idle = self._made("cudaEventCreateWithFlags", 2)
        self._seed = self._draws = 0
        self.hangs = False
        self.refuses_reads = False
        FakeCuda.current = self

    def _made(self, function: str, flags: int) -> ctypes.c_void_p:
        handle = ctypes.c_void_p()
        assert getattr(self.runtime, function)(ctypes.byref(handle), flags) == 0
        return handle

    @property
    def compute_stream(self) -> int:
        return int(self._streams[0].value or 0)

    @property
    def batch_stream(self) -> int:
        return int(self._streams[1].value or 0)

    @property
    def side_stream(self) -> int:
        """A stream of the model's own."""
        return int(self._streams[2].value or 0)

    def current_stream(self) -> int:
        return self.compute_stream

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """A kernel begins when what was queued before it is done. Here it is done when it returns."""
        if not self.hangs:
            self.runtime.cudaEventRecord(self._idle, self._streams[0])
            while (code := self.runtime.cudaEventQuery(self._idle)) == NOT_READY:
                pass
            if code != 0:
                raise AcceleratorError(f"CUDA error: {TEXTS[code]}")
        with NoReads() if self.refuses_reads else contextlib.nullcontext():
            yield

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.full(tuple(shape), -77, device=self.device).to(dtype)  # What is never written is found wrong.

    empty_for_batch = empty

    def seed(self, seed: int) -> None:
        self._seed, self._draws = seed, 0

    def generator_state(self) -> torch.Tensor:
        return torch.tensor([self._seed, self._draws]).view(torch.uint8)

    def set_generator_state(self, state: torch.Tensor) -> None:
        self._seed, self._draws = state.view(torch.int64).tolist()

    def draw(self) -> float:
        """A random number of the device."""
        self._draws += 1
        return float(torch.rand((), generator=torch.Generator().manual_seed(1000 * self._seed + self._draws)))


def install(library: str = str(LIBRARY), nccl: str = FakeCuda.nccl) -> Installed:
    _cuda.Cuda = FakeCuda  # type: ignore[misc]
    _cuda.check = lambda: None
    FakeCuda.library, FakeCuda.nccl = library, nccl
    return Installed(library, nccl)


class Installed:
    """Installs the fake in a process that unpickles it."""

    def __init__(self, library: str = str(LIBRARY), nccl: str = FakeCuda.nccl) -> None:
        self._libraries = library, nccl

    def __reduce__(self) -> Any:
        return install, self._libraries


def start(model: Any, dataset: Any, nccl: str = FakeCuda.nccl, **options: Any) -> accelmgr.Manager:
    """As in device_runners.py. The host has no fake: it needs no device."""
    if not hasattr(model, "fake_of_cuda"):
        model.fake_of_cuda = Installed(nccl=nccl)
    return start_on_device(model, dataset, **{"device": "cuda", **options})
