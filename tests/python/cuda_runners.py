"""Runners on a CUDA device that is a fake: torch computes on the CPU, at once, and copies run late.

The library tests/engine/support/fake_gpu.cpp takes the place of CUDA's runtime. Ranks with even numbers execute as late
as possible, those with odd numbers in threads. With `nccl` it takes the place of NCCL too, and all execute in threads.

With TEST_ON_GPU=1 runners compute on the GPU of this machine instead, and share it.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from device_runners import Does
from device_runners import start as start_on_device
from device_runners import train as train_on
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import accelmgr
from accelmgr import _native
from accelmgr._process import torch_settings
from accelmgr._runner import cuda as _cuda

TESTS = pathlib.Path(_native.__file__).parents[2] / "tests"
LIBRARY = TESTS / "engine/support/fake_cuda_home/lib64/libcudart.so.13"
NOT_READY = 600
ILLEGAL_ADDRESS, ASSERT = 700, 710
AcceleratorError: type[Exception] = getattr(torch, "AcceleratorError", RuntimeError)  # torch 2.8 and newer have it.
TEXTS = {ILLEGAL_ADDRESS: "an illegal memory access was encountered", ASSERT: "device-side assert triggered"}

GPU = os.environ.get("TEST_ON_GPU") == "1"
on_the_fake = pytest.mark.skipif(GPU, reason="it asks the fake for something")
if GPU:
    os.environ["NVIDIA_TF32_OVERRIDE"] = "0"  # Gradients are compared with those of the CPU.
    # The first backward() of a process asks the driver for devices, whose files stay open: before a test counts them.
    torch.ones(1, requires_grad=True).sum().backward()
else:  # Where a manager looks for GPUs, it finds those of a fake driver, if the build has one.
    os.environ["LD_LIBRARY_PATH"] = str(TESTS / "engine/support/fake_driver")
    os.environ["FAKE_DRIVER_GPUS"] = "8"
    os.environ["FAKE_DRIVER_MACHINE"] = str(os.getpid())  # Managers claim GPUs; those of other tests are others.


def refuse_reads(function: Any) -> None:
    if str(function).startswith(("aten._local_scalar_dense", "aten.nonzero", "aten.equal", "aten.is_nonzero")):
        raise RuntimeError(f"{function} reads from the device")


def tensors_of(values: Any) -> Iterator[torch.Tensor]:
    return (each for each in tree_leaves(values) if isinstance(each, torch.Tensor) and each.layout is torch.strided)


class NoReads(TorchDispatchMode):
    """Refuses what makes a host wait for a device: a value that it reads, or a shape that depends on values."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        refuse_reads(function)
        return function(*args, **(kwargs or {}))


class FakeGraph:
    """Records what torch computes, and computes it again in the same memory, if that is there still. Recording executes
    it too, because torch must have values; what it has written is put back then, and what it has made is spoilt."""

    def __init__(self, cuda: FakeCuda, shared: Any) -> None:
        self._cuda = cuda
        self._stream = cuda.streams[0]
        self._operations: list[Operation] = []
        self._graph = ctypes.c_void_p()
        self._size = 0

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        runtime = self._cuda.runtime
        generators = torch.get_rng_state(), self._cuda.generator_state()
        assert runtime.cudaStreamBeginCapture(self._stream, 1) == 0
        self._cuda.is_recording = self._cuda.generator_records = True
        recorder = Recorder(lambda: runtime.fake_cuda_graph_size(self._stream))
        try:
            with recorder:
                yield
        finally:
            self._size = runtime.fake_cuda_graph_size(self._stream)
            assert runtime.cudaStreamEndCapture(self._stream, ctypes.byref(self._graph)) == 0
            torch.set_rng_state(generators[0])
            self._cuda.set_generator_state(generators[1])
            recorder.undo()
            self._cuda.is_recording = False
            if self._cuda.recording_is_invalid:  # As torch's capture_end(): it raises before it is through.
                self._cuda.recording_is_invalid = False
                raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
            self._cuda.generator_records = False
        self._operations = recorder.operations

    def replay(self) -> None:
        done = 0
        with torch._C._AutoDispatchBelowAutograd():
            for operation in self._operations:
                self._launch(done, operation.size)
                done = operation.size
                operation.execute()
        self._launch(done, self._size)

    def _launch(self, first: int, last: int) -> None:
        """What the transport has recorded between two operations."""
        if first < last:
            self._cuda.runtime.fake_cuda_launch(
                self._stream, self._graph, ctypes.c_size_t(first), ctypes.c_size_t(last)
            )


class Outside:
    """A tensor that a graph has not made, and does not keep."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._storage = StorageWeakRef(tensor.untyped_storage())
        self._form = tensor.storage_offset(), tensor.shape, tensor.stride()
        self._dtype = tensor.dtype
        self._is_conj = tensor.is_conj()

    def tensor(self) -> torch.Tensor:
        storage = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        if storage is None:
            raise RuntimeError("CUDA error: a graph uses memory that was freed")
        tensor = torch.empty(0, dtype=self._dtype).set_(storage, *self._form)
        return tensor.conj() if self._is_conj else tensor


def inside(value: Any) -> Any:
    return value.tensor() if isinstance(value, Outside) else value


@dataclasses.dataclass
class Operation:
    function: Any
    args: Any
    kwargs: Any
    result: Any
    size: int  # Of what the transport had recorded before it.
    grad_enabled: bool

    def execute(self) -> None:
        args, kwargs, result = tree_map(inside, (self.args, self.kwargs, self.result))
        with torch.set_grad_enabled(self.grad_enabled):
            again = self.function(*args, **kwargs)
        for to, value in zip(tensors_of(result), tensors_of(again), strict=True):
            if to.data_ptr() != value.data_ptr():
                to.copy_(value)


class Recorder(TorchDispatchMode):
    def __init__(self, graph_size: Any) -> None:
        super().__init__()
        self._graph_size = graph_size
        self.operations: list[Operation] = []
        self._made: dict[int, torch.Tensor] = {}
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        refuse_reads(function)
        for tensor in tensors_of((args, kwargs)):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._made and storage._cdata not in self._before:
                self._before[storage._cdata] = storage, storage.clone()
        result = function(*args, **kwargs)
        for tensor in tensors_of(result):
            if tensor.untyped_storage()._cdata not in self._before:
                self._made[tensor.untyped_storage()._cdata] = tensor
        kept = tree_map(self._kept, (args, kwargs, result))
        self.operations.append(Operation(function, *kept, self._graph_size(), torch.is_grad_enabled()))
        return result

    def _kept(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.layout is torch.strided:
            made = value.untyped_storage()._cdata in self._made
            return value.detach() if made else Outside(value)  # Another operation may transpose the tensor itself.
        return value

    def undo(self) -> None:
        for storage, before in self._before.values():
            storage.copy_(before)
        for tensor in self._made.values():
            tensor.untyped_storage().fill_(0xFF)


class FakeCuda(_cuda.Cuda):
    """Takes the place of torch.cuda in a runner."""

    current: FakeCuda
    library = str(LIBRARY)
    nccl = "no library"  # That of torch would be called with memory that is no GPU's.

    def __init__(self, rank: int) -> None:
        self.device = torch.device("cpu")
        self.runtime = ctypes.CDLL(str(LIBRARY))
        self.runtime.fake_cuda_graph_size.restype = ctypes.c_size_t
        self.runtime.fake_cuda_start(int(rank % 2 == 0 and self.nccl != str(LIBRARY)), ctypes.c_uint64(rank))
        self.streams = [self._made("cudaStreamCreateWithFlags", 1) for _ in range(3)]
        self._idle = self._made("cudaEventCreateWithFlags", 2)
        self._seed = self._draws = 0
        self.is_recording = self.generator_records = self.recording_is_invalid = False
        self.hangs = False
        self.refuses_reads = False
        FakeCuda.current = self

    def _made(self, function: str, flags: int) -> ctypes.c_void_p:
        handle = ctypes.c_void_p()
        assert getattr(self.runtime, function)(ctypes.byref(handle), flags) == 0
        return handle

    @property
    def compute_stream(self) -> _native.DeviceStream:
        return _native.DeviceStream(self.streams[0].value or 0)

    @property
    def batch_stream(self) -> _native.DeviceStream:
        return _native.DeviceStream(self.streams[1].value or 0)

    @property
    def side_stream(self) -> _native.DeviceStream:
        """A stream of the model's own."""
        return _native.DeviceStream(self.streams[2].value or 0)

    def current_stream(self) -> _native.DeviceStream:
        return self.compute_stream

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """A kernel begins when what was queued before it is done. Here it is done when it returns."""
        self.catch_up()
        with NoReads() if self.refuses_reads else contextlib.nullcontext():
            yield

    def catch_up(self) -> None:
        if self.hangs:
            return
        self.runtime.cudaEventRecord(self._idle, self.streams[0])
        while (code := self.runtime.cudaEventQuery(self._idle)) == NOT_READY:
            pass
        if code != 0:
            raise AcceleratorError(f"CUDA error: {TEXTS[code]}")

    def empty(self, shape: Sequence[int], dtype: torch.dtype, strides: Sequence[int] | None = None) -> torch.Tensor:
        tensor = torch.full(tuple(shape), -77, device=self.device).to(dtype)  # What is never written is found wrong.
        return tensor if strides is None else tensor.as_strided(tuple(shape), tuple(strides))

    empty_for_batch = empty

    def new_graph(self, shared: Any) -> Any:
        return FakeGraph(self, shared)

    def seed(self, seed: int) -> None:
        self._seed, self._draws = seed, 0

    def generator_state(self) -> torch.Tensor:
        return torch.tensor([self._seed, self._draws]).view(torch.uint8)

    def set_generator_state(self, state: torch.Tensor) -> None:
        self._seed, self._draws = state.view(torch.int64).tolist()

    def invalidate_recording(self) -> None:
        """What torch.cuda.synchronize() does: no watch of torch's operations sees it."""
        if not self.is_recording:
            return
        self.recording_is_invalid = True
        raise AcceleratorError("CUDA error: operation not permitted when stream is capturing")

    def replace_generator(self, state: torch.Tensor) -> None:
        self.generator_records = False
        self.set_generator_state(state)

    def draw(self) -> float:
        """A random number of the device."""
        if self.generator_records and not self.is_recording:
            raise RuntimeError("Offset increment outside graph capture encountered unexpectedly.")
        self._draws += 1
        return float(torch.rand((), generator=torch.Generator().manual_seed(1000 * self._seed + self._draws)))


def install(library: str = str(LIBRARY), nccl: str = FakeCuda.nccl) -> Does:
    _cuda.Cuda = FakeCuda  # type: ignore[misc]
    _cuda.check = lambda: None
    FakeCuda.library, FakeCuda.nccl = library, nccl
    return Does(functools.partial(install, library, nccl))


@contextlib.contextmanager
def sent(fake: object) -> Iterator[None]:
    """What a manager sends that starts in the block has the fake, among torch's settings: runners open their devices
    when they have read those, and before they have a model."""
    torch_settings.SETTINGS["fake of cuda"] = torch_settings.Setting(lambda: fake, lambda _: None)
    try:
        yield
    finally:
        del torch_settings.SETTINGS["fake of cuda"]


def start(model: Any, dataset: Any, nccl: str = FakeCuda.nccl, fake: object = None, **options: Any) -> accelmgr.Manager:
    """As in device_runners.py. The host has no fake: it needs no device."""
    if nccl != FakeCuda.nccl:
        options = {"runners__nccl": "auto", **options}
    if GPU:
        return start_on_device(model, dataset, **{"device": "cuda", "runners__oversubscribe": True, **options})
    with sent(fake or Does(functools.partial(install, nccl=nccl))):
        return start_on_device(model, dataset, **{"device": "cuda", **options})


train = functools.partial(train_on, start)
