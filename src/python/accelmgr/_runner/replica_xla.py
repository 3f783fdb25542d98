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

import collections
import concurrent.futures
import contextlib
import importlib
import itertools
import re
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.utils.dlpack

from accelmgr import _native
from accelmgr._common.memory import tensor_over, unfilled
from accelmgr._runner.device import DeviceReplica
from accelmgr._runner.replica import Abandoned, Changes, Field, Kept, Place, put_back, set_aside
from accelmgr.errors import DeviceError, ModelError

SIGN_OF_LIFE_S = 0.02
GROUP_BYTES = 4 << 20  # A group is copied into the slab while the next one is read; a thread is woken for each.
Indexed = list[tuple[int, torch.Tensor]]
_FAILURE = re.compile(
    r"\b(ABORTED|CANCELLED|DATA_LOSS|DEADLINE_EXCEEDED|INTERNAL|RESOURCE_EXHAUSTED|UNAVAILABLE|UNKNOWN): "
)
"""The status codes of a device or a runtime that has failed. Those of a program, as UNIMPLEMENTED, would come again."""
_SEED = struct.Struct("<Q")  # The state of torch_xla's generator; it stands behind that of the CPU's.


class DeviceThread:
    """Does the work with a device, one call after the other, while the runner's thread waits.

    The work of an attempt that was left goes on, and the next attempt waits for it: what it compiles is needed again.
    """

    def __init__(self, patience_s: float) -> None:
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "accelmgr:device")
        self._left: concurrent.futures.Future[Any] | None = None  # The work that was left, if it goes on.
        self._left_begun = 0.0
        self._patience_s = patience_s

    @property
    def idle(self) -> bool:
        return self._left is None or self._left.done()

    def call(self, wanted: Callable[[], bool], function: Callable[..., Any], *arguments: Any) -> Any:
        """Returns what the function returns, or raises what it raises. Raises Abandoned as soon as it is not `wanted`.

        Call it when the thread is idle. wanted: called while this waits, as a sign of life.
        """
        return next(self.each(wanted, function, [arguments]))

    def each(
        self, wanted: Callable[[], bool], function: Callable[..., Any], calls: Iterable[tuple[Any, ...]]
    ) -> Iterator[Any]:
        """call() with each of these arguments in turn. The thread works on while the caller uses what came first."""
        begun = time.monotonic()
        works = collections.deque(self._thread.submit(function, *arguments) for arguments in calls)
        while works:
            try:
                works[0].exception(SIGN_OF_LIFE_S)
            except concurrent.futures.TimeoutError:
                if not wanted():
                    self._left, self._left_begun = works[-1], begun
                    raise Abandoned from None
            else:
                yield works.popleft().result()

    def wait_until_idle(self, wanted: Callable[[], bool]) -> None:
        """Waits for the work that was left, and drops its outcome. Raises Abandoned as soon as it is not `wanted`.

        Work that takes longer than a whole step may is a device that hangs: there are no more signs of life then, and
        the watchdog ends this process.
        """
        if self._left is None:
            return
        while not concurrent.futures.wait([self._left], SIGN_OF_LIFE_S).done:
            if time.monotonic() - self._left_begun > self._patience_s:
                concurrent.futures.wait([self._left])
            elif not wanted():
                raise Abandoned
        self._left = None


def groups_of(tensors: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """The tensors in their order, in groups to be read one after the other."""
    groups: list[list[torch.Tensor]] = [[]]
    size = 0
    for tensor in tensors:
        if size >= GROUP_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += tensor.numel() * tensor.element_size()
    return groups


def failure_of_device(error: BaseException | None) -> str:
    """The text of torch_xla's runtime in `error` or its causes which says that the device has failed, or ''."""
    while error is not None:
        if type(error) is RuntimeError and _FAILURE.search(str(error)):
            return str(error)
        error = error.__cause__
    return ""


def exchange(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """Swaps the contents of two tensors, also of another device. `tensor` stays the object that others refer to.

    Parameters that are tied stay tied, and lists, closures and hooks of the model see the new content. It is
    torch.utils.swap_tensors(), which refuses tensors with weak references, as those of an LSTM have.
    """
    before, after = tensor._backward_hooks, tensor._post_accumulate_grad_hooks
    torch._C._swap_tensor_impl(tensor, other)
    # Autograd has noted the hooks with the former content.
    if before:
        tensor._backward_hooks = before
    if after:
        tensor._post_accumulate_grad_hooks = after


class XlaReplica(DeviceReplica):
    """Implements engine/replica/replica.hpp on a device of torch_xla.

    The tensors that describe() has described stay on the CPU: those of parameters are the master's from bind() on,
    those of buffers are what the session reads and writes between attempts.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        collate_fn: Any,
        device: torch.device,
        *,
        autocast: str,
        accumulates: bool,
        patience_s: float,
        changes: Changes | None,
    ) -> None:
        """accumulates: a step has several micro-batches. patience_s: more than any work with the device takes."""
        super().__init__(model, collate_fn, device, autocast, changes)
        self._xla: Any = importlib.import_module("torch_xla")
        self._xla_model: Any = importlib.import_module("torch_xla.core.xla_model")
        self._is_cpu = self._xla.runtime.device_type() == "CPU"
        self._accumulates = accumulates
        self._thread = DeviceThread(patience_s)
        self._master: list[torch.Tensor] = []
        self._own_buffers = list(self._buffers.originals)  # On the device from bind() on.
        self._stale = set(range(len(self._parameters)))  # The device does not have the present values of these.
        self._generator: bytes | None = None  # A state to be loaded when the device is idle.
        self._sums: list[torch.Tensor | None] = [None] * len(self._parameters)
        self._used = [False] * len(self._parameters)  # Had a gradient in this attempt.
        self._changed = [False] * len(self._own_buffers)  # Was written in this attempt.
        self._divisor: tuple[float | torch.Tensor, torch.Tensor] | None = None
        self._flags: list[torch.Tensor] = []  # False and True, on the device.
        self._micro_batches = 0
        self._kept: Kept = []  # Sums over micro-batches in `.grad`, while forward() runs.

    # What the runner calls

    def bind(self, places: list[Place], sink: _native.Sink) -> None:
        self._note_rounding(places)
        for parameter, (memory, dtype, strides) in zip(self._parameters, places, strict=True):
            self._master.append(tensor_over(memory, dtype, parameter.shape, strides))
        self._sink = sink
        self._thread.call(lambda: True, self._move)

    def seed(self, seed: int) -> None:
        super().seed(seed)
        self._xla_model.set_rng_state(seed)

    def begin_attempt(self) -> None:
        was_left, self._left = self._left, False
        with self._leaving():
            self._thread.wait_until_idle(self._wanted)
            super().begin_attempt()
            self._load_generator()
            if was_left:
                self._has_buffers = False  # What was left may have sent them while they were loaded.
            self._used = [False] * len(self._parameters)
            self._changed = [False] * len(self._own_buffers)
            self._micro_batches = 0
            for parameter in self._parameters:
                parameter.grad = None

    def load_parameters(self) -> None:
        assert self._sink is not None
        self._stale.update(index for index in range(len(self._parameters)) if self._sink.is_stale(index))

    def run(self, fields: list[Field], divisor: float) -> None:
        if self._left:
            return
        with self._leaving():
            self._follow()
            loss = self._call(self._forward_pass, self._inputs(fields), divisor)
            if self._sink is not None:
                self._sink.backward_begins()
            self._call(self._backward_pass, loss)

    def collect(self) -> tuple[float, list[tuple[str, float]]]:
        with self._leaving():
            self._check()
            with unfilled():
                self._take()
            return self._totals()
        return 0.0, []

    def settle(self) -> None:
        """The buffers of the session stay where they are; those of the model are put back after each micro-batch."""

    def generator_state(self) -> torch.Tensor:
        seed = _SEED.pack(self._xla_model.get_rng_state())
        return torch.cat([super().generator_state(), torch.frombuffer(bytearray(seed), dtype=torch.uint8)])

    def load_generator(self, state: bytearray) -> None:
        self._generator = bytes(state)
        if self._thread.idle:
            self._load_generator()

    def _load_generator(self) -> None:
        state, self._generator = self._generator, None
        if state is None:
            return
        super().load_generator(bytearray(state))
        own = super().generator_state().numel()
        if len(state) == own + _SEED.size:  # Otherwise it was saved by a replica on the CPU.
            self._xla_model.set_rng_state(*_SEED.unpack_from(state, own))

    # What its thread does

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        if self._left:
            raise Abandoned
        return self._thread.call(self._wanted, function, *arguments)

    def _wanted(self) -> bool:
        return self._sink is None or self._sink.wanted()

    @contextlib.contextmanager
    def _leaving(self) -> Iterator[None]:
        try:
            with super()._leaving():
                yield
        except Exception as error:
            if failure := failure_of_device(error):
                raise DeviceError(f"the XLA device has failed: {failure}") from error
            raise

    def _uploaded(self, values: Any) -> Any:
        """Copies of tensors on the device, in one transfer; of all tensors in nested mappings, lists and tuples."""
        with unfilled():
            return self._xla_model.send_cpu_data_to_device(values, self._device)

    def _move(self) -> None:
        """Moves parameters and buffers to the device, as yet without their values."""
        dtypes = [tensor.dtype for tensor in (*self._master, *self._own_buffers)]
        for tensor, dtype in zip((*self._parameters, *self._own_buffers), dtypes, strict=True):
            twin = torch.empty(tensor.shape, dtype=dtype, device=self._device)
            exchange(tensor, twin.requires_grad_(tensor.requires_grad))
            if not isinstance(tensor, torch.nn.Parameter):
                self._session_buffers.append(twin)
        self._flags = self._uploaded([torch.tensor(False), torch.tensor(True)])

    def _bring(self) -> None:
        """Brings the values that have changed to the device."""
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

    def _forward_pass(self, inputs: Any, divisor: float) -> torch.Tensor:
        self._bring()
        self._kept = set_aside(self._parameters)
        loss, scalars = self._loss(self._uploaded(inputs), divisor)
        self._note(loss, scalars, divisor)
        return loss

    def _divided(self, loss: torch.Tensor, divisor: float | torch.Tensor) -> torch.Tensor:
        if self._divisor is None or self._divisor[0] != divisor or self._divisor[1].dtype != loss.dtype:
            self._divisor = divisor, self._uploaded([torch.tensor(divisor, dtype=loss.dtype)])[0]
        return super()._divided(loss, self._divisor[1])

    def _backward_pass(self, loss: torch.Tensor) -> None:
        put_back(self._kept)
        loss.backward()  # type: ignore[no-untyped-call]
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

    def _take(self) -> None:
        """Reads all that a step gives. The sink takes gradients while the thread reads those that follow."""
        if self._left:
            raise Abandoned
        gradients: Indexed = []
        for index, parameter in enumerate(self._parameters):
            gradient = self._sums[index] if self._used[index] else parameter.grad
            if gradient is not None:
                gradients.append((index, gradient.detach()))
        buffers = [(index, buffer) for index, buffer in enumerate(self._own_buffers) if self._changed[index]]
        tensors = [*self._numbers(), *(tensor for _, tensor in buffers + gradients)]
        reads = [(group,) for group in groups_of(tensors)]
        read = itertools.chain.from_iterable(self._thread.each(self._wanted, self._read, reads))
        self._put_numbers(read)
        for index, _ in buffers:
            self._session_buffers[index].copy_(next(read))
        for index, _ in gradients:
            dense = self._dense(index, next(read))
            if self._sink is not None:
                self._sink.capture_unlocked(index, dense.data_ptr())
        if not self._accumulates:
            self._sums = [None] * len(self._parameters)

    def _read(self, tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The tensors on the CPU, when they are computed. If that is the device, they are not copied."""
        if not self._is_cpu:
            return torch._to_cpu(tensors)
        runtime = self._xla._XLAC
        own = [tensor for tensor in tensors if tensor.device == self._device]
        runtime._xla_sync_multi(own, [])  # Each has memory of its own now, which a program under way may yet fill.
        runtime._xla_wait_device_ops([])
        read = (torch.utils.dlpack.from_dlpack(runtime._to_dlpack(tensor)) for tensor in own)
        return [next(read) if tensor.device == self._device else tensor for tensor in tensors]

    def _dense(self, index: int, gradient: torch.Tensor) -> torch.Tensor:
        form = self._master[index]
        if gradient.shape != form.shape:  # A hook has called resize_().
            raise ModelError(f"the gradient of a parameter {list(form.shape)} is {list(gradient.shape)}")
        return gradient.to(form.dtype).contiguous()

    def _check(self) -> None:
        self._structure.check()
        for name, parameter in zip(self._names, self._parameters, strict=True):
            if parameter.device != self._device:
                raise ModelError(f"the model moved its parameter '{name}' from {self._device} to {parameter.device}")
