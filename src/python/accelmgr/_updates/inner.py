# Runs in: the host, which orders; runners, which step.
"""Inner steps: an optimizer of the host steps in each runner, whose parameters stay there until the host asks for them.

Runners that are forks were made when the host had the optimizer, so they have it as it was then, with its state; others
are sent it. What the host has changed of its groups since then, a learning rate for instance, comes with each step.
"""

from __future__ import annotations

import dataclasses
import mmap
import os
import weakref
from typing import Any

import torch

from accelmgr._memory.memfd import HostFile, open_memfd
from accelmgr._memory.placement import aligned, tensor_in
from accelmgr._serialization.describe import describe
from accelmgr.errors import ModelError

OPTIMIZERS: weakref.WeakValueDictionary[int, torch.optim.Optimizer] = weakref.WeakValueDictionary()
"""The optimizers of inner steps in the host, and so in its forks, by number."""

NAME = "accelmgr-inner"
WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtypes for checksums, by the bytes of an element."""

Numbers = dict[str, Any]
"""What a group of an optimizer has besides its parameters: learning rate, momentum and the like."""


@dataclasses.dataclass(frozen=True)
class Division:
    """Several runners on the CPU update parameters that they share: joint_update.py."""

    memory: str
    """The address of the shared parameters, `PID:FD`."""
    ranks: list[int]
    """The rank that updates each parameter of the optimizer, group by group."""


@dataclasses.dataclass
class Order:
    """What the host asks of one step."""

    optimizer: int
    """The optimizer's number in OPTIMIZERS."""
    made: int
    """How many inner steps the runners have made since they got the optimizer."""
    groups: list[Numbers]
    """What the host has changed since then, group by group."""
    clip_grad_norm: float | None
    loads: bool
    """The host had the parameters of the runners, and may have written to them since."""
    division: Division | None = None
    """None: each runner has all parameters, and updates all of them."""
    sent: str = ""
    """The address of a SentOptimizer, for runners that are no forks. The optimizer gets a new number each time."""
    repeated: int = 0
    """StepResult.repeated."""


@dataclasses.dataclass
class Outcome:
    """What inner steps have made of an optimizer. For each tensor it has a Lies."""

    values: list[Any]
    """The optimizer's parameters, group by group; None for each if all runners share the parameters."""
    state: list[dict[str, Any]]
    """The state of each parameter, group by group; empty for a parameter that another runner updates."""
    groups: list[Numbers]


@dataclasses.dataclass
class Lies:
    """The place of a tensor in a Shelf."""

    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int


class Shelf(HostFile):
    """Memory of the host in which a runner puts tensors."""

    def __init__(self) -> None:
        super().__init__(NAME)
        self._mapped: mmap.mmap | None = None

    def open(self, outcome: Outcome) -> Outcome:
        """The outcome with tensors, which are valid until a runner puts others there."""
        return Outcome(
            list(map(self.taken, outcome.values)),
            [{name: self.taken(value) for name, value in state.items()} for state in outcome.state],
            outcome.groups,
        )

    def taken(self, value: Any) -> Any:
        """The tensor of a Lies, valid until a runner puts others there; any other value as it is."""
        if not isinstance(value, Lies):
            return value
        size = os.fstat(self.fd).st_size
        if self._mapped is None or len(self._mapped) < size:
            self._mapped = mmap.mmap(self.fd, size)
        return tensor_in(self._mapped, value.offset, value)


class _Putting:
    """The side of a runner."""

    def __init__(self) -> None:
        self._size = 0
        self._tensors: list[tuple[torch.Tensor, Lies]] = []

    def put(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        lies = Lies(self._size, value.dtype, tuple(value.shape), value.numel() * value.element_size())
        self._size += aligned(lies.nbytes)
        self._tensors.append((value.detach(), lies))
        return lies

    def write(self, address: str) -> None:
        if self._size == 0:
            return  # No tensor, or all are empty.
        pid, fd = address.split(":")
        file = open_memfd(pid, fd, NAME, os.O_RDWR)
        try:
            if os.fstat(file).st_size < self._size:
                os.ftruncate(file, self._size)
            with mmap.mmap(file, self._size) as memory:
                for tensor, lies in self._tensors:
                    tensor_in(memory, lies.offset, lies).copy_(tensor)
        finally:
            os.close(file)


class Resident:
    """The optimizer of a runner."""

    present: Resident | None = None
    """The Resident of this process."""

    def __init__(self, optimizer: torch.optim.Optimizer, own: set[int] | None = None) -> None:
        """own: the parameters that this runner updates, by id(); None: all."""
        self.optimizer = optimizer
        self.own = own
        self.made = 0
        self._failure = ""

    def check(self, made: int) -> None:
        """Raises ModelError if this process has not made all of the host's inner steps."""
        if self._failure:
            raise ModelError(f"the optimizer has failed in inner step {self.made + 1} of this runner: {self._failure}")
        check_made(self.made, made)

    def step(self, order: Order, parameters: list[torch.Tensor], norm: torch.Tensor | None = None) -> float:
        """Makes a step of the host. norm: the norm of all gradients, where others count, too.

        Requires: `.grad` of the parameters is the mean gradient.

        The step is committed, so what the optimizer raises becomes the error of the next step or sync. Returns the
        norm before clipping, or 0.
        """
        try:
            for group, numbers in zip(self.optimizer.param_groups, order.groups, strict=True):
                group.update(numbers)
            if order.clip_grad_norm is not None and norm is None:
                norm = torch.nn.utils.clip_grad_norm_(parameters, order.clip_grad_norm)
            elif order.clip_grad_norm is not None and norm is not None:
                torch.nn.utils.clip_grads_with_norm_(parameters, order.clip_grad_norm, norm)
            self.optimizer.step()
        except Exception as error:
            self._failure = describe(error)
        else:
            self.made += 1
        return 0.0 if norm is None else float(norm)  # Waits for a device, which has the optimizer's work by now.


def check_made(own: int, made: int) -> None:
    """Raises ModelError if this process has not made all of the host's inner steps."""
    if own != made:
        raise ModelError(
            f"this runner has taken the place of another, and has {own} of its {made} inner steps: the host makes "
            "them again"
        )


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The optimizer's parameters, group by group."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def numbers_of(group: dict[str, Any]) -> Numbers:
    return {name: value for name, value in group.items() if name != "params"}


def outcome(made: int, address: str, _model: Any) -> Outcome:
    """Called in a runner, by Manager.call(). address: a Shelf's. Raises ModelError as Resident.check() does."""
    resident = _resident(made)
    parameters, own = parameters_of(resident.optimizer), resident.own
    states = [resident.optimizer.state.get(each, {}) if own is None or id(each) in own else {} for each in parameters]
    putting = _Putting()
    found = Outcome(
        [putting.put(parameter if own is None else None) for parameter in parameters],
        [{name: putting.put(value) for name, value in state.items()} for state in states],
        [numbers_of(group) for group in resident.optimizer.param_groups],
    )
    putting.write(address)
    return found


def checksums(made: int, _model: Any) -> list[int]:
    """Called in a runner, too: a checksum of each parameter of the optimizer, computed where the parameter is."""
    found = []
    for parameter in parameters_of(_resident(made).optimizer):
        value = parameter.detach().contiguous()
        value = torch.view_as_real(value) if value.is_complex() else value
        found.append(int(value.view(WORDS[value.element_size()]).sum(dtype=torch.int64)))
    return found


def _resident(made: int) -> Resident:
    if (resident := Resident.present) is None:
        raise ModelError("this runner has made no inner step")
    resident.check(made)
    return resident
