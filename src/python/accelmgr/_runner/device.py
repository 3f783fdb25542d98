# Runs in: runners.
"""What runners on a CUDA device and those on an XLA device have in common."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, TypeGuard

import torch

from accelmgr._runner.replica import Abandoned, Changes, Replica
from accelmgr.errors import ConfigError, ModelError

KEY = "runners.device"
FORKED = "a fork has none of its threads; use start_method 'spawn' or 'forkserver'"


def check_autograd(rank: int, device: torch.device, kind: str) -> None:
    """Raises ConfigError if autograd has no thread for the device: the first backward() of a process starts them."""
    try:
        torch.ones(1, device=device, requires_grad=True).sum().backward()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        if "fork" not in str(error):
            raise
        raise ConfigError(
            f"{KEY} is {kind}, but backward() was called already in the process that runner {rank} was forked from, "
            f"which started autograd's threads, and {FORKED} ({str(error).partition(' INTERNAL')[0]})",
            KEY,
        ) from error


class DeviceReplica(Replica):
    """A replica on a device. Buffers lie twice: on the device those of the model, on the CPU those of the session."""

    def __init__(
        self, model: torch.nn.Module, collate_fn: Any, device: torch.device, autocast: str, changes: Changes | None
    ) -> None:
        super().__init__(model, collate_fn, autocast=autocast, changes=changes, grown={})
        self._device = device
        self._device_type = device.type
        self._left = False  # The attempt is over; the device may still compute it.
        self._session_buffers: list[torch.Tensor] = []
        self._has_buffers = False  # The device has the present ones.

    def buffers_loaded(self) -> None:
        self._has_buffers = False

    @contextlib.contextmanager
    def _leaving(self) -> Iterator[None]:
        try:
            yield
        except Abandoned:
            self._left = True

    def _divided(self, loss: torch.Tensor, divisor: float | torch.Tensor) -> torch.Tensor:
        if loss.device != self._device:
            raise ModelError(f"the model's loss is on {loss.device}; its parameters and inputs are on {self._device}")
        return super()._divided(loss, divisor)

    def _is_here(self, value: float | torch.Tensor) -> TypeGuard[torch.Tensor]:
        return isinstance(value, torch.Tensor) and value.device == self._device

    def _numbers(self) -> list[torch.Tensor]:
        """The losses, and the scalars that are on the device."""
        return [*self._losses, *(value for _, value, _ in self._scalars if self._is_here(value))]

    def _put_numbers(self, read: Iterator[torch.Tensor]) -> None:
        """In the place of each of _numbers(): its copy on the CPU."""
        self._losses = [next(read) for _ in self._losses]
        self._scalars = [
            (name, next(read) if self._is_here(value) else value, weight) for name, value, weight in self._scalars
        ]
