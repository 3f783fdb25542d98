# Runs in: runners; the manager asks whether torch has an accelerator.
"""The replica of a Python model on the accelerator of torch: CUDA, ROCm, XPU, or a backend outside torch.

It asks torch.accelerator and the backend's own module, and nothing else. A backend that pins no memory is copied from
and to memory that is not pinned; one without generators draws what it likes.

- Parameters go up once per version, and nothing waits for them: what computes with them is queued behind.
- Gradients are summed in `.grad`, on the device, and come back when the last backward pass of a step is queued.
- A thread does all work with the device, which may compile, or compute without a queue, for as long as it likes.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch

from accelmgr._data.elements import mapped
from accelmgr._runner.cuda import failure_of
from accelmgr._runner.device import KEY, ThreadReplica, check_autograd
from accelmgr._serialization.describe import describe
from accelmgr.errors import ConfigError, ModelError


def check_build() -> torch.device:
    """The kind of torch's accelerator. Raises ConfigError if it has none. Asks no driver, so that this process may be
    forked."""
    known = hasattr(torch, "accelerator")  # torch 2.6 and newer.
    found = torch.accelerator.current_accelerator() if known else None
    if found is None:
        raise ConfigError(
            f"{KEY} is accelerator, but torch {torch.__version__} of {sys.executable} "
            f"{'knows no accelerator' if known else 'has no torch.accelerator'}; install torch 2.6 or newer that was "
            "built for the device (CUDA, ROCm, XPU) or has a backend for it, or use runners.device cpu",
            KEY,
        )
    return found


def _select(device: torch.device) -> None:
    """Makes it the current device of this thread."""
    select = getattr(torch.accelerator, "set_device_index", None) or torch.accelerator.set_device_idx  # In torch 2.6.
    select(device.index)


def open_device(rank: int, oversubscribe: bool) -> torch.device:
    """The device with the number `rank`. Raises ConfigError if there is none."""
    kind = check_build().type
    about = f"{KEY} is accelerator, but"
    count = torch.accelerator.device_count()
    if count == 0 or (rank >= count and not oversubscribe):
        raise ConfigError(
            f"{about} torch {torch.__version__} says that device_count() of kind {kind} is {count}, which leaves none "
            f"for runner {rank}; {f'set nprocs to {count}, or runners.oversubscribe' if count else 'use another'}",
            KEY,
        )
    device = torch.device(kind, rank % count)
    try:
        _select(device)
        torch.zeros(1).to(device).cpu()
    except Exception as error:
        raise ConfigError(f"{about} runner {rank} cannot open {device}: {describe(error)}", KEY) from error
    check_autograd(rank, device, "accelerator")
    return device


def _pins() -> bool:
    try:
        return torch.empty(1, pin_memory=True).is_pinned()
    except (RuntimeError, NotImplementedError):
        return False


class AcceleratorReplica(ThreadReplica):
    """Implements engine/replica/replica.hpp on the accelerator of torch."""

    _is_busy = False  # Work that an attempt has queued may be unfinished.
    _versions: Sequence[int] = ()

    def seed(self, seed: int) -> None:
        super().seed(seed)
        self._ask("manual_seed", seed)

    def _ask(self, name: str, *arguments: Any) -> Any:
        """Calls a function of the backend's module. None if it has no such function."""
        function = getattr(torch.get_device_module(self._device), name, None)
        return None if function is None else function(*arguments)

    def _device_generator(self) -> torch.Tensor:
        state = self._ask("get_rng_state", self._device)
        return torch.empty(0, dtype=torch.uint8) if state is None else state

    def _load_device_generator(self, state: torch.Tensor) -> None:
        self._ask("set_rng_state", state, self._device)

    def _failure_of(self, error: Exception) -> str:
        failure = failure_of(error, self._device_type)
        return f"the device {self._device} has failed: {describe(failure)}" if failure else ""

    # What its thread does

    def _move(self) -> None:
        _select(self._device)
        super()._move()
        self._is_pinned = _pins()

    def _begin(self) -> None:
        if self._is_busy:
            self._call(self._finish)  # It was aborted; memory that its copies read is used again from now on.

    def _finish(self) -> None:
        torch.accelerator.synchronize(self._device)
        self._is_busy = False

    def _bring(self) -> None:
        self._is_busy = True
        stale = [(self._parameters[index], self._master[index]) for index in sorted(self._stale)]
        buffers = [] if self._has_buffers else zip(self._own_buffers, self._session_buffers, strict=True)
        with torch.no_grad():
            for own, value in (*stale, *buffers):
                own.copy_(value, non_blocking=True)
        self._stale.clear()
        self._has_buffers = True
        if stale or not self._versions:
            self._versions = [parameter._version for parameter in self._parameters]

    def _uploaded(self, values: Any) -> Any:
        return mapped(lambda tensor: tensor.to(self._device, non_blocking=True), values, self._moved)

    def _backward_pass(self, loss: torch.Tensor) -> None:
        super()._backward_pass(loss)
        self._buffers.settle()
        for name, parameter, version in zip(self._names, self._parameters, self._versions, strict=True):
            if parameter._version != version:
                raise ModelError(f"the model wrote to its parameter '{name}'; parameters are the host's to change")

    def _gradient(self, index: int) -> torch.Tensor | None:
        gradient = super()._gradient(index)
        return gradient if gradient is None or gradient.layout is torch.strided else gradient.to_dense()

    def _read(self, tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        read = [torch.empty_like(tensor, device="cpu", pin_memory=self._is_pinned) for tensor in tensors]
        for host, tensor in zip(read, tensors, strict=True):
            host.copy_(tensor, non_blocking=True)
        self._finish()
        return read
