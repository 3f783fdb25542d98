# Runs in: runners.
"""The replica of a Python model on a CUDA device.

What torch queues there runs later, on one stream; copies run on streams beside it. Nothing is read before the last
backward pass is queued, and nothing waits but for memory that is to be used again:

- Parameters go up once per version, behind the first batch. A batch goes up while the one before computes.
- Gradients are summed in `.grad`, on the device. In the last micro-batch of a step each is reported as soon as it is
  complete, and the transport copies them in buckets while backward goes on.
- Losses, scalars and buffers come back behind the last kernel, in one go.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from accelmgr import _native
from accelmgr._data.elements import PICKLED, mapped, restore_structure
from accelmgr._memory.placement import aligned, tensor_in
from accelmgr._memory.tensors import dense_over, stored
from accelmgr._runner.cuda import Cuda, failure_of
from accelmgr._runner.cuda_gradient_hooks import CudaGradientHooks
from accelmgr._runner.device import KEY, DeviceReplica
from accelmgr._runner.graphs import Graphs
from accelmgr._runner.outputs import Numbers
from accelmgr._runner.replica import (
    Abandoned,
    Change,
    Description,
    Field,
    HostChanges,
    described,
)
from accelmgr._serialization.describe import describe
from accelmgr._updates.inner import Order, Resident
from accelmgr._updates.joint_update import Place
from accelmgr.errors import ConfigError, DeviceError, ModelError, UsageError


def places_in(tensors: Sequence[torch.Tensor]) -> tuple[list[int], int]:
    """Where each tensor lies in memory that all share, and the size of that memory."""
    offsets, size = [], 0
    for tensor in tensors:
        offsets.append(size)
        size += aligned(tensor.nbytes)
    return offsets, size


class CudaReplica(DeviceReplica):
    """Implements engine/replica/replica.hpp on the CUDA device of this process.

    The tensors that describe() has described stay on the CPU, and bind() leaves them. From then on `settle()` describes
    the tensors that the session reads and writes.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        collate_fn: Any,
        cuda: Cuda,
        *,
        autocast: str,
        records: bool,
        patience_s: float,
        changes: HostChanges | None,
    ) -> None:
        """records: CUDA graphs. patience_s: a wait for the device that takes longer means that it hangs."""
        super().__init__(model, collate_fn, cuda.device, autocast, changes)
        self._cuda = cuda
        self._patience_s = patience_s
        self._records = records
        self._graphs: Graphs | None = None
        self._is_stale = False  # Parameters are to be loaded.
        self._device_buffers = self._buffers.originals
        self._described = False
        self._versions: list[int] = []

    # What the runner calls

    def bind(self, places: list[Place], runner: _native.RunnerSide) -> None:
        with self._blaming():
            self._runner = runner
            targets = self._move_parameters(places, runner.shared)
            self._move_buffers()
            try:
                self._transport = _native.CudaTransport(
                    runner=runner,
                    library=self._cuda.library,
                    compute=self._cuda.compute_stream,
                    batches=self._cuda.batch_stream,
                    parameters=targets,
                    timeout_s=self._patience_s,
                )
            except UsageError as error:  # The library is not one that the transport knows.
                raise ConfigError(f"{KEY} is cuda, but {error}", KEY) from error
            self._hooks = CudaGradientHooks(self._names, self._parameters, runner, self._transport, self._cuda)
            self._gradients = self._hooks
            if self._records:
                self._graphs = Graphs(self._model, self._cuda, self._parameters, self._hooks, runner.warn)

    def seed(self, seed: int) -> None:
        super().seed(seed)
        self._cuda.seed(seed)

    def begin_attempt(self) -> None:
        self._left = False
        with self._blaming(), self._leaving():
            if not self._transport.begin_attempt():
                raise Abandoned
            super().begin_attempt()
            if self._graphs is not None:
                self._graphs.begin_attempt()

    def load_parameters(self) -> None:
        with self._blaming():
            order = self._follow_order()
        if order is not None and not order.loads:
            return
        self._is_stale = True  # Behind them the first batch would wait for all of them, in a queue of the device.

    def _take_home(self, resident: Resident) -> None:
        """Does nothing: the parameters are on the device already, and their values come with the first batch."""

    def _leave_home(self) -> None:
        """Does nothing: the parameters stay on the device, and are loaded with the next batch."""

    def apply(self, gradients: list[Place | None], scale: float) -> float:
        with self._blaming(), self._cuda.computing():
            return super().apply(gradients, scale)

    def _step(self, resident: Resident, order: Order) -> float:
        if resident.made == 0:
            resident.optimizer.load_state_dict(resident.optimizer.state_dict())  # Moves its state to the device.
        norm = super()._step(resident, order)
        self._versions = [parameter._version for parameter in self._parameters]
        return norm

    def _load_parameters(self) -> None:
        if self._is_stale:
            self._transport.load_parameters()
            self._is_stale = False

    def team_member(self) -> _native.TeamMember | str:
        try:
            return self._transport.team_member(self._cuda.nccl)
        except UsageError as error:
            return str(error)

    def run(self, fields: list[Field], divisor: float) -> None:
        if self._left:
            return
        with self._blaming(), self._leaving():
            self._follow_order()
            self._transport.begin_work()
            self._bring_buffers()
            inputs = self._inputs(fields)
            self._load_parameters()
            self._hooks.begin_micro_batch()
            with self._cuda.computing():
                if self._graphs is None:
                    numbers = self._compute(inputs, divisor)
                else:
                    own = torch.full((), divisor, dtype=torch.float64, device=self._device)
                    last = self._hooks.of_last_micro_batch()
                    numbers = self._graphs.run(inputs, own, last, self._compute)
                self._note(*numbers, divisor)

    def _compute(self, inputs: Any, divisor: float | torch.Tensor) -> Numbers:
        """Forward and backward pass."""
        self._hooks.begin_forward()
        loss, scalars = self._loss(inputs, divisor)
        del inputs
        self._hooks.begin_backward()
        loss.backward()  # type: ignore[no-untyped-call]
        self._hooks.end_backward()
        self._buffers.settle()
        return loss.detach(), scalars

    def _follow(self) -> Change:
        made = super()._follow()
        if self._graphs is not None and made is not Change.NOTHING:
            self._graphs.forget()
        return made

    def collect(self) -> tuple[float, list[tuple[str, float]]]:
        with self._blaming(), self._leaving():
            if self._left:
                raise Abandoned
            self._transport.begin_work()
            self._load_parameters()  # There was no batch. The others of a team wait for this one.
            self._check()
            with self._cuda.computing():
                self._hooks.rest()
                self._read()
            if not self._hooks.keeps:
                self._hooks.forget()
            if self._graphs is not None:
                self._graphs.end_attempt()
            return self._totals()
        return 0.0, []

    def settle(self) -> list[Description] | None:
        """The model's own buffers are put back after each micro-batch; those of the session never move."""
        if self._described:
            return None
        self._described = True
        return [described("", tensor, False) for tensor in [*self._session_buffers, *self._of_host]]

    def _device_generator(self) -> torch.Tensor:
        return self._cuda.generator_state()

    def _load_device_generator(self, state: torch.Tensor) -> None:
        self._cuda.set_generator_state(state)

    @contextlib.contextmanager
    def _blaming(self) -> Iterator[None]:
        """In the block, errors of a device become DeviceError, and what a kernel finds in its input ModelError."""
        try:
            yield
        except Abandoned:
            raise
        except Exception as error:
            failure = failure_of(error)
            if failure is not None and not isinstance(failure, DeviceError):
                raise DeviceError(describe(failure)) from error
            if failure is None and isinstance(error, DeviceError):
                raise ModelError(describe(error)) from error
            raise

    # Memory of the device

    def _move_parameters(self, places: list[Place], shared: list[tuple[int, int]]) -> list[torch.Tensor | None]:
        """Moves the parameters to the device, without values. Returns the memory of those that have their own."""
        self._note_rounding(places)
        twins = {
            index: self._cuda.empty(parameter.shape, getattr(torch, places[index][1]), places[index][2])
            for index, parameter in enumerate(self._parameters)
            if shared[index][0] < 0
        }
        for index, parameter in enumerate(self._parameters):
            owner, offset = shared[index]
            if owner < 0:
                parameter.data = twins[index]
            else:
                parameter.data = torch.as_strided(twins[owner], parameter.shape, places[index][2], offset)
        self._addresses = [parameter.data_ptr() for parameter in self._parameters]
        self._versions = [parameter._version for parameter in self._parameters]
        return [stored(twins[index]) if index in twins else None for index in range(len(self._parameters))]

    def _move_buffers(self) -> None:
        for buffer in self._device_buffers:
            self._session_buffers.append(torch.empty(buffer.shape, dtype=buffer.dtype))
            buffer.data = self._cuda.empty(buffer.shape, buffer.dtype)

    def _staged(
        self, tensors: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]
    ) -> list[tuple[torch.Tensor, int]]:
        """Copies tensors to memory that the device reads. Returns each target, which is dense, and its offset."""
        offsets, size = places_in(tensors)
        memory = self._transport.stage(size)
        if memory is None:
            raise Abandoned
        for tensor, offset in zip(tensors, offsets, strict=True):
            tensor_in(memory, offset, tensor).copy_(tensor)
        return list(zip(targets, offsets, strict=True))

    def _bring_buffers(self) -> None:
        if not self._has_buffers and self._session_buffers:
            self._transport.load_behind(self._staged(self._session_buffers, self._device_buffers))
        self._has_buffers = True

    def _inputs(self, fields: list[Field]) -> Any:
        if fields[0][0] == PICKLED:
            values = super()._inputs(fields)
        else:
            values = restore_structure([(name, dense_over(held, dtype, shape)) for name, dtype, shape, held in fields])
        tensors: list[torch.Tensor] = []
        targets: list[torch.Tensor] = []

        def sent(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.layout is not torch.strided or tensor.device.type != "cpu":
                with self._cuda.computing():
                    return tensor.to(self._device)
            tensors.append(tensor)
            targets.append(self._cuda.empty_for_batch(tensor.shape, tensor.dtype))
            return targets[-1]

        def moved(value: Any) -> Any:
            with self._cuda.computing():
                return self._moved(value)

        inputs = mapped(sent, values, moved)
        if tensors:
            self._transport.load(self._staged(tensors, targets))
        return inputs

    # Results

    def _check(self) -> None:
        super()._check()
        for name, parameter, version in zip(self._names, self._parameters, self._versions, strict=True):
            if parameter._version != version:
                raise ModelError(f"the model wrote to its parameter '{name}'; parameters are the host's to change")

    def _read(self) -> None:
        """Waits for the device, reads losses, scalars and buffers, and tells how large gradients are.

        Raises Abandoned if the attempt is over.
        """
        self._buffers.check_alike()
        indices, magnitudes = self._hooks.magnitudes()
        numbers = torch.cat([*(number.reshape(1).to(torch.float64) for number in self._numbers()), magnitudes])
        tensors = [numbers, *(buffer.contiguous() for buffer in self._device_buffers)]
        offsets, size = places_in(tensors)
        memory = self._transport.read(list(zip(tensors, offsets, strict=True)), size)
        if not self._transport.finish():
            raise Abandoned
        read = tensor_in(memory, 0, numbers).clone()
        assert self._runner is not None
        for index, magnitude in zip(indices, read[len(read) - len(indices) :].tolist(), strict=True):
            self._runner.magnitude(index, magnitude)
        self._put_numbers(iter(read))
        for buffer, tensor, offset in zip(self._session_buffers, tensors[1:], offsets[1:], strict=True):
            buffer.copy_(tensor_in(memory, offset, tensor))
