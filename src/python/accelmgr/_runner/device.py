# Runs in: runners.
"""What runners on a CUDA device, on an XLA device and on an accelerator of torch have in common."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeGuard

import torch

from accelmgr import _native
from accelmgr._memory.tensors import order_of, ordered, tensor_over, unfilled
from accelmgr._runner.gradient_hooks import Kept, put_back, set_aside
from accelmgr._runner.replica import Abandoned, Field, HostChanges, Replica
from accelmgr._updates.joint_update import Place
from accelmgr.errors import ConfigError, DeviceError, ModelError

KEY = "runners.device"
SIGN_OF_LIFE_S = 0.02
GROUP_BYTES = 4 << 20  # A group is copied into the slab while the next one is read; a thread is woken for each.
FORKED = "a fork has none of its threads; use start_method 'spawn' or 'forkserver'"


def check_autograd(rank: int, device: torch.device, kind: str) -> None:
    """Raises ConfigError if autograd has no thread for the device: the first backward() of a process starts them."""
    try:
        torch.ones(1, device=device, requires_grad=True).sum().backward()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        # In a fork, torch names it only if autograd had threads for another device.
        if "fork" not in str(error) and "device_ready_queues_" not in str(error):
            raise
        raise ConfigError(
            f"{KEY} is {kind}, but backward() was called already in the process that runner {rank} was forked from, "
            f"which started autograd's threads, and {FORKED} ({str(error).partition(' INTERNAL')[0]})",
            KEY,
        ) from error


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

        wanted: called while this waits, as a sign of life.

        Requires: the thread is idle.
        """
        return next(self.each(wanted, function, [arguments]))

    def each(
        self, wanted: Callable[[], bool], function: Callable[..., Any], calls: Iterable[tuple[Any, ...]]
    ) -> Iterator[Any]:
        """As call() with each of these arguments in turn. The thread works on while the caller uses earlier results."""
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

        If the work takes longer than a whole step may, the device hangs: then there are no more signs of life, and the
        watchdog ends this process.
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


def exchange(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """Swaps the contents of two tensors, also of another device. `tensor` stays the object that others refer to.

    Parameters that are tied stay tied, and lists, closures and hooks of the model see the new content. As
    torch.utils.swap_tensors(), which however refuses tensors with weak references, such as an LSTM's.
    """
    before, after = tensor._backward_hooks, tensor._post_accumulate_grad_hooks
    torch._C._swap_tensor_impl(tensor, other)
    # Autograd has noted the hooks with the former content.
    if before:
        tensor._backward_hooks = before
    if after:
        tensor._post_accumulate_grad_hooks = after


class DeviceReplica(Replica):
    """A replica on a device. Buffers exist twice: the model's on the device, the session's on the CPU."""

    def __init__(
        self, model: torch.nn.Module, collate_fn: Any, device: torch.device, autocast: str, changes: HostChanges | None
    ) -> None:
        super().__init__(model, collate_fn, autocast=autocast, changes=changes)
        self._device = device
        self._device_type = device.type
        self._left = False  # The attempt is over; the device may still compute it.
        self._session_buffers: list[torch.Tensor] = []
        self._has_buffers = False  # The device has the present buffers.

    def buffers_loaded(self) -> None:
        self._has_buffers = False

    def generator_state(self) -> torch.Tensor:
        return torch.cat([super().generator_state(), self._device_generator()])

    def load_generator(self, state: bytearray) -> None:
        super().load_generator(state)
        own = super().generator_state().numel()
        behind = torch.frombuffer(state, dtype=torch.uint8)[own:].clone()
        if 0 < behind.numel() == self._device_generator().numel():  # Otherwise another device has saved it.
            self._load_device_generator(behind)

    def _device_generator(self) -> torch.Tensor:
        """The state of the device's generator, in bytes. It is saved behind the state of the CPU's."""
        raise NotImplementedError

    def _load_device_generator(self, state: torch.Tensor) -> None:
        raise NotImplementedError

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

    def _moved(self, value: Any) -> Any:
        """The value on the device, if it knows how to go there: for example a batch of a library for graphs."""
        if not callable(getattr(value, "to", None)) or isinstance(value, type):
            return value
        return value.to(self._device)

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


class ThreadReplica(DeviceReplica):
    """A replica whose thread does all work with the device, while the runner's thread gives signs of life.

    The tensors that describe() has described stay on the CPU. Parameters are the master's from bind() on; buffers are
    what the session reads and writes between attempts. Losses, scalars, gradients and buffers come back at the end of a
    step, group by group: one is copied into the slab while the next is read.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        collate_fn: Any,
        device: torch.device,
        *,
        autocast: str,
        patience_s: float,
        changes: HostChanges | None,
    ) -> None:
        """patience_s: more than any work with the device takes."""
        super().__init__(model, collate_fn, device, autocast, changes)
        self._thread = DeviceThread(patience_s)
        self._master: list[torch.Tensor] = []
        self._own_buffers = list(self._buffers.originals)  # On the device from bind() on.
        self._stale = set(range(len(self._parameters)))  # The device does not have the present values of these.
        self._generator: bytes | None = None  # A state to be loaded when the device is idle.
        self._kept: Kept = []  # Sums over micro-batches in `.grad`, while forward() runs.

    # What the runner calls

    def bind(self, places: list[Place], runner: _native.RunnerSide) -> None:
        self._note_rounding(places)
        for parameter, (memory, dtype, strides) in zip(self._parameters, places, strict=True):
            self._master.append(tensor_over(memory, dtype, parameter.shape, strides))
        self._runner = runner
        with self._leaving():
            self._thread.call(lambda: True, self._move)

    def begin_attempt(self) -> None:
        was_left, self._left = self._left, False
        with self._leaving():
            self._thread.wait_until_idle(self._wanted)
            super().begin_attempt()
            self._load_generator()
            if was_left:
                self._has_buffers = False  # Work that was left may have sent them while they were loaded.
            self._begin()
            for parameter in self._parameters:
                parameter.grad = None

    def load_parameters(self) -> None:
        assert self._runner is not None
        self._stale.update(index for index in range(len(self._parameters)) if self._runner.is_stale(index))

    def run(self, fields: list[Field], divisor: float) -> None:
        if self._left:
            return
        with self._leaving():
            self._follow()
            loss = self._call(self._forward_pass, self._inputs(fields), divisor)
            if self._runner is not None:
                self._runner.backward_begins()
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

    def load_generator(self, state: bytearray) -> None:
        self._generator = bytes(state)
        if self._thread.idle:
            self._load_generator()

    def _load_generator(self) -> None:
        state, self._generator = self._generator, None
        if state is not None:
            super().load_generator(bytearray(state))

    # What each kind of device does in its own way

    def _failure_of(self, error: Exception) -> str:
        """The text that says that the device has failed, or '' if the model is to blame."""
        raise NotImplementedError

    def _begin(self) -> None:
        """An attempt begins; the thread is idle."""

    def _empty_like(self, form: torch.Tensor) -> torch.Tensor:
        """Memory on the device, in the order of `form` if the device knows strides."""
        return torch.empty_like(form, device=self._device)

    def _bring(self) -> None:
        """Brings the values that have changed to the device."""
        raise NotImplementedError

    def _uploaded(self, values: Any) -> Any:
        """Copies on the device of all tensors in nested mappings, lists and tuples."""
        raise NotImplementedError

    def _gradient(self, index: int) -> torch.Tensor | None:
        """The sum over the micro-batches of the attempt."""
        return self._parameters[index].grad

    def _written_buffers(self) -> list[int]:
        return list(range(len(self._own_buffers)))

    def _read(self, tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The tensors on the CPU, when they are computed."""
        raise NotImplementedError

    # What its thread does

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        if self._left:
            raise Abandoned
        return self._thread.call(self._wanted, function, *arguments)

    def _wanted(self) -> bool:
        return self._runner is None or self._runner.wanted()

    @contextlib.contextmanager
    def _leaving(self) -> Iterator[None]:
        try:
            with super()._leaving():
                yield
        except Exception as error:
            if failure := self._failure_of(error):
                raise DeviceError(failure) from error
            raise

    def _move(self) -> None:
        """Moves parameters and buffers to the device, as yet without their values."""
        forms = [*self._master, *self._own_buffers]
        for index, (tensor, form) in enumerate(zip((*self._parameters, *self._own_buffers), forms, strict=True)):
            twin = self._empty_like(form)
            exchange(tensor, twin.requires_grad_(tensor.requires_grad))
            if index >= len(self._parameters):
                self._session_buffers.append(twin)

    def _forward_pass(self, inputs: Any, divisor: float) -> torch.Tensor:
        self._bring()
        self._kept = set_aside(self._parameters)
        loss, scalars = self._loss(self._uploaded(inputs), divisor)
        self._note(loss, scalars, divisor)
        return loss

    def _backward_pass(self, loss: torch.Tensor) -> None:
        put_back(self._kept)
        loss.backward()  # type: ignore[no-untyped-call]

    def _take(self) -> None:
        """Reads all that a step gives. The runner takes gradients while the thread reads those that follow."""
        if self._left:
            raise Abandoned
        found = ((index, self._gradient(index)) for index in range(len(self._parameters)))
        gradients = [(index, gradient.detach()) for index, gradient in found if gradient is not None]
        buffers = [(index, self._own_buffers[index]) for index in self._written_buffers()]
        tensors = [*self._numbers(), *(tensor for _, tensor in buffers + gradients)]
        reads = [(group,) for group in groups_of(tensors)]
        read = itertools.chain.from_iterable(self._thread.each(self._wanted, self._read, reads))
        self._put_numbers(read)
        for index, _ in buffers:
            self._session_buffers[index].copy_(next(read))
        for index, _ in gradients:
            dense = self._dense(index, next(read))
            if self._runner is not None:
                self._runner.capture_unlocked(index, dense.data_ptr())

    def _dense(self, index: int, gradient: torch.Tensor) -> torch.Tensor:
        form = self._master[index]
        if gradient.shape != form.shape:  # A hook has called resize_().
            raise ModelError(
                f"parameter '{self._names[index]}' is {list(form.shape)}, its gradient {list(gradient.shape)}"
            )
        return ordered(gradient.to(form.dtype), order_of(form))

    def _check(self) -> None:
        self._structure.check()
        for name, parameter in zip(self._names, self._parameters, strict=True):
            if parameter.device != self._device:
                raise ModelError(f"the model moved its parameter '{name}' from {self._device} to {parameter.device}")
