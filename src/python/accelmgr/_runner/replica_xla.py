# Runs in: runners.
"""The replica of a Python model on an XLA device.

XLA records what a model does and computes it later, as one program for each micro-batch, which it compiles once. What
follows from that:

- Parameters go to the device when the host has written some, all at once. Losses, scalars, gradients and buffers come
  back at the end of a step, group by group: one is copied into the slab while the next is read. Nothing is read
  before: every read would end the program there. If the device is the CPU, they are not copied to be read.
- A number that may change is a tensor on the device. As a number of Python it would be part of the program, which
  would be compiled again for each value.
- Compiling may take minutes. A thread does all work with the device, while the runner's thread gives signs of life.
- Models draw from torch_xla's own generator, and from the CPU's where they ask for the CPU. Both are saved.
"""

from __future__ import annotations

import importlib
import re
import struct
from collections.abc import Sequence
from typing import Any

import torch
import torch.utils.dlpack

from accelmgr._memory.tensors import unfilled
from accelmgr._runner.device import ThreadReplica
from accelmgr._runner.replica import HostChanges
from accelmgr.errors import ModelError

_FAILURE = re.compile(
    r"\b(ABORTED|CANCELLED|DATA_LOSS|DEADLINE_EXCEEDED|INTERNAL|RESOURCE_EXHAUSTED|UNAVAILABLE|UNKNOWN): "
)
"""The status codes of a failed device or runtime. The codes of a program, such as UNIMPLEMENTED, would come again."""
_SEED = struct.Struct("<Q")  # The state of torch_xla's generator.


def failure_of_device(error: BaseException | None) -> str:
    """The text of torch_xla's runtime, in `error` or its causes, that the device has failed; '' if there is none."""
    while error is not None:
        if type(error) is RuntimeError and _FAILURE.search(str(error)):
            return str(error)
        error = error.__cause__
    return ""


class XlaReplica(ThreadReplica):
    """Implements engine/replica/replica.hpp on a device of torch_xla."""

    def __init__(
        self,
        model: torch.nn.Module,
        collate_fn: Any,
        device: torch.device,
        *,
        autocast: str,
        accumulates: bool,
        patience_s: float,
        changes: HostChanges | None,
    ) -> None:
        """accumulates: a step has several micro-batches."""
        super().__init__(model, collate_fn, device, autocast=autocast, patience_s=patience_s, changes=changes)
        self._xla: Any = importlib.import_module("torch_xla")
        self._xla_model: Any = importlib.import_module("torch_xla.core.xla_model")
        self._is_cpu = self._xla.runtime.device_type() == "CPU"
        self._accumulates = accumulates
        self._sums: list[torch.Tensor | None] = [None] * len(self._parameters)
        self._used = [False] * len(self._parameters)  # Had a gradient in this attempt.
        self._changed = [False] * len(self._own_buffers)  # Was written in this attempt.
        self._divisor: tuple[float | torch.Tensor, torch.Tensor] | None = None
        self._flags: list[torch.Tensor] = []  # False and True, on the device.
        self._micro_batches = 0

    def seed(self, seed: int) -> None:
        super().seed(seed)
        self._xla_model.set_rng_state(seed)

    def _device_generator(self) -> torch.Tensor:
        return torch.frombuffer(bytearray(_SEED.pack(self._xla_model.get_rng_state())), dtype=torch.uint8)

    def _load_device_generator(self, state: torch.Tensor) -> None:
        self._xla_model.set_rng_state(*_SEED.unpack(bytes(state.tolist())))

    def _failure_of(self, error: Exception) -> str:
        failure = failure_of_device(error)
        return failure and f"the XLA device has failed: {failure}"

    def _begin(self) -> None:
        self._used = [False] * len(self._parameters)
        self._changed = [False] * len(self._own_buffers)
        self._micro_batches = 0

    def _uploaded(self, values: Any) -> Any:
        """In one transfer."""
        with unfilled():
            return self._xla_model.send_cpu_data_to_device(values, self._device)

    def _empty_like(self, form: torch.Tensor) -> torch.Tensor:
        return torch.empty(form.shape, dtype=form.dtype, device=self._device)

    def _move(self) -> None:
        super()._move()
        self._flags = self._uploaded([torch.tensor(False), torch.tensor(True)])

    def _bring(self) -> None:
        with torch.no_grad():
            if stale := sorted(self._stale):
                values = self._uploaded([self._master[index] for index in stale])
                for index, value in zip(stale, values, strict=True):
                    self._parameters[index].data = value
                self._stale.clear()
            if not self._has_buffers and self._own_buffers:
                for buffer, value in zip(self._own_buffers, self._uploaded(self._session_buffers), strict=True):
                    buffer.data = value
            self._has_buffers = True
            if self._accumulates:
                missing = [i for i, p in enumerate(self._parameters) if p.requires_grad and self._sums[i] is None]
                zeros = self._uploaded([torch.zeros_like(self._master[i]) for i in missing]) if missing else []
                for index, zero in zip(missing, zeros, strict=True):
                    self._sums[index] = zero

    def _divided(self, loss: torch.Tensor, divisor: float | torch.Tensor) -> torch.Tensor:
        if self._divisor is None or self._divisor[0] != divisor or self._divisor[1].dtype != loss.dtype:
            self._divisor = divisor, self._uploaded([torch.tensor(divisor, dtype=loss.dtype)])[0]
        return super()._divided(loss, self._divisor[1])

    def _backward_pass(self, loss: torch.Tensor) -> None:
        super()._backward_pass(loss)
        with torch.no_grad():
            for index, parameter in enumerate(self._parameters):
                self._add_gradient(index, parameter)
        self._buffers.settle()
        self._look_for_writes()
        self._micro_batches += 1
        self._xla.sync()

    def _look_for_writes(self) -> None:
        """Notes the buffers that the micro-batch writes. Raises ModelError if it writes a parameter."""
        tensors = [*self._parameters, *self._own_buffers]
        written: list[bool] = self._xla._XLAC._check_tensor_need_materialization(tensors)
        for name, is_written in zip(self._names, written, strict=False):
            if is_written:
                raise ModelError(f"the model wrote to its parameter '{name}'; parameters are the host's to change")
        for index, is_written in enumerate(written[len(self._parameters) :]):
            self._changed[index] |= is_written

    def _add_gradient(self, index: int, parameter: torch.Tensor) -> None:
        if parameter._post_accumulate_grad_hooks:
            return  # A hook of the user sees the sum over micro-batches, which stays in `.grad`.
        gradient, parameter.grad = parameter.grad, None
        sum_ = self._sums[index]
        if self._accumulates and sum_ is not None:
            # The first micro-batch of a step has the same program as the others.
            sum_ = torch.where(self._flags[self._micro_batches > 0], sum_, 0)
        elif not self._used[index]:
            sum_ = None
        if gradient is not None:
            dense = gradient if gradient.layout is torch.strided else gradient.to_dense()
            sum_ = dense if sum_ is None else sum_ + dense
            self._used[index] = True
        self._sums[index] = sum_

    def _gradient(self, index: int) -> torch.Tensor | None:
        return self._sums[index] if self._used[index] else self._parameters[index].grad

    def _written_buffers(self) -> list[int]:
        return [index for index, changed in enumerate(self._changed) if changed]

    def _take(self) -> None:
        super()._take()
        if not self._accumulates:
            self._sums = [None] * len(self._parameters)

    def _read(self, tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """If the device is the CPU, they are not copied."""
        if not self._is_cpu:
            return torch._to_cpu(tensors)
        runtime = self._xla._XLAC
        own = [tensor for tensor in tensors if tensor.device == self._device]
        runtime._xla_sync_multi(own, [])  # Each has memory of its own now, which a program under way may yet fill.
        runtime._xla_wait_device_ops([])
        read = (torch.utils.dlpack.from_dlpack(runtime._to_dlpack(tensor)) for tensor in own)
        return [next(read) if tensor.device == self._device else tensor for tensor in tensors]
