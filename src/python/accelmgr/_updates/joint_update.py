# Runs in: the host, which divides the work; runners on the CPU.
"""Inner steps of several runners on the CPU: they share one copy of the parameters, and each updates some of them.

An optimizer of torch.optim computes for each parameter alone. So each runner steps with the parameters that are its
own, and it alone has their state. The copy is not the master, which keeps the parameters of the last sync.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import optimizer as _torch_optimizer

from accelmgr import _native
from accelmgr._memory.memfd import open_memfd
from accelmgr._memory.tensors import tensor_over, write
from accelmgr._updates.inner import Division, Order, Resident, parameters_of

NAME = "accelmgr-parameters"

Place = tuple[Any, str, tuple[int, ...]]
"""The bytes, dtype and strides of a parameter."""


def is_divisible(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer computes for each parameter alone. Code that is not torch's may look at all gradients."""
    if not hasattr(torch.nn.utils, "get_total_norm"):  # From torch 2.6 on.
        return False
    step = vars(optimizer).get("step")
    if step is not None and not hasattr(step, "_wrapped_by_lr_sched"):  # A scheduler's wrapper only counts the calls.
        return False
    before, after = _torch_optimizer._global_optimizer_pre_hooks, _torch_optimizer._global_optimizer_post_hooks
    own = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    hooks = [hook for registered in (before, after, *own) for hook in registered.values()]
    if any(not (getattr(hook, "__module__", None) or "").startswith("accelmgr.") for hook in hooks):
        return False
    code = type(optimizer), type(optimizer).step, optimizer.step
    return all(part.__module__.split(".")[:2] == ["torch", "optim"] for part in code)


def division_of(parameters: Sequence[torch.Tensor], memory: str, team: list[int]) -> Division:
    """Each rank gets about as many elements to update as the others."""
    sizes = [parameter.numel() if parameter.requires_grad else 0 for parameter in parameters]
    loads = dict.fromkeys(team, 0)
    ranks = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True):
        rank = ranks[index] = min(team, key=loads.__getitem__)
        loads[rank] += sizes[index]
    return Division(memory, ranks)


class SharedParameters:
    """The copy of the parameters, as the host has it."""

    def __init__(self, handle: _native.Handle, leaves: list[torch.Tensor], optimizer: torch.optim.Optimizer) -> None:
        """leaves: in the order of the master."""
        fd, places = handle.shared_parameters()
        own = parameters_of(optimizer)
        team = [runner.rank for runner in handle.statistics().runners]
        self.division = division_of(own, f"{os.getpid()}:{fd}", team)
        tensors = {
            id(leaf): tensor_over(place.memory, place.dtype, place.shape, place.strides)
            for leaf, place in zip(leaves, places, strict=True)
        }
        self._values = [(parameter, tensors[id(parameter)]) for parameter in own]

    def load(self) -> None:
        """Gives the runners the parameters that this process has."""
        for parameter, value in self._values:
            write(value, parameter)

    @property
    def values(self) -> list[torch.Tensor]:
        """The optimizer's parameters as the runners have updated them, group by group."""
        return [value for _, value in self._values]


class JointUpdate:
    """The part of the update that one runner makes."""

    def __init__(
        self,
        division: Division,
        rank: int,
        optimizer: torch.optim.Optimizer,
        parameters: list[torch.Tensor],
        runner: _native.RunnerSide,
    ) -> None:
        """parameters: of the replica, all that have a gradient."""
        pid, fd = division.memory.split(":")
        to_read, to_write = runner.share(open_memfd(pid, fd, NAME, os.O_RDWR))
        self.own = {id(each) for each, of in zip(parameters_of(optimizer), division.ranks, strict=True) if of == rank}
        """The parameters that this runner updates, by id()."""
        shared = set(map(id, parameters_of(optimizer)))
        self._parameters = parameters
        self._to_read: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._own: list[tuple[int, torch.Tensor, torch.Tensor, torch.Tensor]] = []
        for index, (parameter, read, written) in enumerate(zip(parameters, to_read, to_write, strict=True)):
            if id(parameter) in shared:
                value = _over(read, parameter)
                self._to_read.append((parameter, value))
                if id(parameter) in self.own:
                    self._own.append((index, parameter, value, _over(written, parameter)))

    def take_home(self) -> None:
        """Makes the model compute with the shared parameters."""
        for parameter, value in self._to_read:
            parameter.data = value

    def step(self, resident: Resident, order: Order, means: list[Place | None]) -> float:
        """As Resident.step(), for the parameters that this runner updates. means: of all parameters."""
        gradients = [
            None if place is None else _over(place, parameter).to(parameter.dtype)
            for parameter, place in zip(self._parameters, means, strict=True)
        ]
        clips = order.clip_grad_norm is not None
        norm = torch.nn.utils.get_total_norm([each for each in gradients if each is not None]) if clips else None
        try:
            for index, parameter, _, written in self._own:
                gradient = gradients[index]
                parameter.data = written
                parameter.grad = gradient.clone() if clips and gradient is not None else gradient  # Others read it.
            return resident.step(order, [parameter for _, parameter, _, _ in self._own], norm)
        finally:
            for _, parameter, value, _ in self._own:
                parameter.grad = None
                parameter.data = value


def _over(place: Place, parameter: torch.Tensor) -> torch.Tensor:
    memory, dtype, strides = place
    return tensor_over(memory, dtype, parameter.shape, strides)
