"""CUDA runners under faults: steps that are replayed bit for bit, and what a failing device and a model are told apart
by. The device is the fake of cuda_runners.py."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar

import device_suite
import pytest
import torch
from cuda_runners import ASSERT, ILLEGAL_ADDRESS, AcceleratorError, FakeCuda, install, start
from device_runners import SHAPE, Does, Dropping, Switched, Vectors, bits_of, made, same, wait_until_settled
from torch import nn
from torch.utils.checkpoint import checkpoint

import accelmgr
from accelmgr._runner import cuda

OF_TORCH = "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79.10 GiB"


def break_copies(code: int) -> None:
    """The device breaks when it has done what computing waits for, and has begun to copy gradients."""
    FakeCuda.current.runtime.fake_cuda_break_after(3, code)


def hang(runtime: Any, loss: torch.Tensor) -> None:
    FakeCuda.current.hangs = True
    runtime.fake_cuda_hang_after(0)


def fail(error: Exception) -> None:
    raise error


FAULTS: dict[str, Callable[[Any, torch.Tensor], object]] = {
    "copy fails": lambda runtime, loss: runtime.fake_cuda_fail(b"cudaMemcpyAsync", 2, ILLEGAL_ADDRESS),
    "device breaks": lambda runtime, loss: runtime.fake_cuda_break_after(0, ILLEGAL_ADDRESS),
    "kernel asserts": lambda runtime, loss: runtime.fake_cuda_break_after(0, ASSERT),
    "copies break": lambda runtime, loss: loss.register_hook(lambda _: break_copies(ILLEGAL_ADDRESS)),
    "copies find an assert": lambda runtime, loss: loss.register_hook(lambda _: break_copies(ASSERT)),
    "device hangs": hang,
    "out of memory": lambda runtime, loss: fail(torch.cuda.OutOfMemoryError(OF_TORCH)),
    "out of memory in backward": lambda runtime, loss: loss.register_hook(
        lambda _: fail(torch.cuda.OutOfMemoryError(OF_TORCH))
    ),
    "plain error": lambda runtime, loss: fail(RuntimeError("CUDA error: unspecified launch failure")),
    "plain assert": lambda runtime, loss: fail(RuntimeError("CUDA error: device-side assert triggered")),
}


class Failing(Dropping):
    """Draws random numbers of the device too. Breaks its device when a file says so."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
        outputs = super().forward(x, y)
        drawn = FakeCuda.current.draw() if hasattr(FakeCuda, "current") else 0.5
        runtime = FakeCuda.current.runtime if hasattr(FakeCuda, "current") else None
        for fault, begin in FAULTS.items():
            if self.told(fault):
                begin(runtime, outputs["loss"])
        return outputs | {"loss": outputs["loss"] + drawn, "drawn": drawn}


class Replaces(Switched):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = super().forward(x, y)
        self.layers[0].bias = nn.Parameter(torch.zeros(8))
        return loss


class Moves(Switched):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.layers[0].bias.data = torch.zeros(8)
        return super().forward(x, y)


class Detached(Switched):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return super().forward(x, y).detach()


class TestFaults(device_suite.Faults):
    start = staticmethod(start)
    failing = Failing
    disturbances: ClassVar = [
        *device_suite.Faults.disturbances,
        {0: "device breaks", 2: "copy fails", 3: "out of memory"},
    ]
    resumptions: ClassVar = [({"device": "cuda"}, {"device": "cpu"}), ({"device": "cpu"}, {"device": "cuda"})]
    draws_on_the_cpu = True
    shape_of_failing: ClassVar = {"batch_size_per_device": 3}  # With a second micro-batch it would find what broke.
    lost: ClassVar = {
        "device breaks": ("an illegal memory access was encountered",),
        "copies break": ("cudaEventQuery: cudaErrorIllegalAddress",),
        "copy fails": ("cudaMemcpyAsync: cudaErrorIllegalAddress",),
        "out of memory": ("Tried to allocate 20.00 MiB",),
        "plain error": ("unspecified launch failure",),
        "out of memory in backward": ("Tried to allocate 20.00 MiB",),
    }
    wrong: ClassVar = {
        "kernel asserts": "device-side assert",
        "copies find an assert": "cudaErrorAssert",
        "plain assert": "device-side assert",
    }
    misuses: ClassVar = {
        **device_suite.Faults.misuses,
        Replaces: "after the start 'layers.0.bias' of the model was replaced",
        Moves: "parameter 'layers.0.bias' was replaced",
        Detached: "the loss does not require a gradient",
    }


def test_a_device_that_always_fails_ends_the_run_with_the_reason(tmp_path):
    model = made(Failing, tmp_path)
    with start(model, Vectors(), nprocs=1, runners__max_restarts=1, **SHAPE) as manager:
        model.tell("out of memory")
        assert manager.step().tries == 2
        model.tell("out of memory")
        result = manager.step()
        assert result.status == "runner_lost" and result.error_type == ""
        assert "runners.max_restarts" in result.error and "Tried to allocate 20.00 MiB" in result.error


@pytest.mark.timing
def test_a_device_that_hangs_is_a_timeout_and_then_a_lost_runner(tmp_path, capfd):
    undisturbed = made(Failing, tmp_path)
    with start(undisturbed, Vectors(), nprocs=1, **SHAPE) as manager:
        expected = [bits_of(manager)[0] for _ in range(2)]
    model = made(Failing, tmp_path)
    with start(model, Vectors(), nprocs=1, step_timeout=2.0, abort_grace=30, **SHAPE) as manager:
        assert same(bits_of(manager)[0], expected[0])
        pid = manager.statistics().runners[0].pid
        model.tell("device hangs")
        assert manager.step(accumulate=False).status == "timeout"
        wait_until_settled(manager)
        assert manager.statistics().runners[0].pid == pid, "it has left the step, and so it stays"
        result = manager.step(timeout=60, accumulate=False)
        assert result.ok and manager.statistics().runners[0].pid != pid
        assert result.loss == expected[1][0][0]
    assert "the device hangs: it has not ended within 2 s" in capfd.readouterr().err


def test_a_runtime_that_cannot_be_loaded_is_named(tmp_path):
    with pytest.raises(accelmgr.RunnerError, match="is cuda, but CUDA's runtime .*/nowhere/libcudart.so"):
        start(
            made(Failing, tmp_path), Vectors(), nprocs=1, fake=Does(functools.partial(install, "/nowhere/libcudart.so"))
        )


def test_a_torch_without_cuda_and_a_machine_without_a_driver_are_told_apart(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for version, reason, message in (
        (None, None, "was built without CUDA; install one that was built for it"),
        ("13.0", "Found no NVIDIA driver on your system.\nPlease", "no GPU that torch .* can use: Found no NVIDIA"),
        ("13.0", "No CUDA GPUs are available", r"\(CUDA_VISIBLE_DEVICES=7\): No CUDA GPUs are available"),
    ):
        monkeypatch.setattr(torch.version, "cuda", version)
        monkeypatch.setattr(torch.cuda, "init", lambda reason=reason: fail(RuntimeError(reason)))
        if reason is not None and reason.startswith("No CUDA"):
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
        with pytest.raises(accelmgr.ConfigError, match=message) as caught:
            cuda.check()
        assert caught.value.key == "runners.device"


def test_errors_of_devices_are_told_from_errors_of_models():
    def is_lost(error: Exception) -> bool:
        return cuda.failure_of(error) is not None

    assert is_lost(torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB"))
    assert is_lost(AcceleratorError("CUDA error: an illegal memory access was encountered"))
    assert is_lost(RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"))
    assert is_lost(RuntimeError("cuDNN error: the plan does not run on this device"))
    assert is_lost(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"))
    assert not is_lost(AcceleratorError("CUDA error: device-side assert triggered"))
    assert not is_lost(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_lost(ValueError("a value in a text about CUDA error"))
    wrapped = accelmgr.ModelError("of the model")
    wrapped.__cause__ = RuntimeError("CUDA error: unspecified launch failure")
    assert is_lost(wrapped)


class ComesBack(nn.Module):
    """From its third forward() on, backward comes to the parameters of a layer twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.last = nn.Linear(4, 1)
        self.calls = 0

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = x.clone().requires_grad_()
        times = 2 if self.calls > 2 else 1
        return sum(checkpoint(self.last, x, use_reentrant=True).square().mean() for _ in range(times))


def test_a_gradient_that_changes_after_it_was_copied_is_told_with_the_name_of_the_parameter(capfd):
    with start(ComesBack(), Vectors(), nprocs=1) as manager:
        for _ in range(3):
            manager.step(timeout=60).raise_for_status()  # Another runner, which has counted no calls, makes the third.
    told = capfd.readouterr().err
    assert "backward came to parameter 'last.bias' a second time" in told
