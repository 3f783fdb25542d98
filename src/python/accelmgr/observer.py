"""Processes that watch a service."""

from __future__ import annotations

import math
import os
from typing import NamedTuple

import torch

from accelmgr import _native
from accelmgr._host import arguments
from accelmgr._memory.tensors import tensor_over
from accelmgr.errors import UsageError


class ParameterCopy(NamedTuple):
    """Copies of all parameters of a service at one time."""

    version: int
    """Grows when parameters are written."""
    step: int
    """How many steps were committed then."""
    tensors: dict[str, torch.Tensor]
    """By name, in the model's order; a tied parameter is there once. They share one memory."""


class Observer:
    """Reads the session of a service, and changes nothing. See accelmgr.observe().

    One thread at a time. Raises SessionError where its methods say so, UsageError after close().
    """

    def __init__(self, native: _native.Observer) -> None:
        self._native: _native.Observer | None = native

    def _opened(self) -> _native.Observer:
        if self._native is None:
            raise UsageError("this observer was closed; call accelmgr.observe() again")
        return self._native

    @property
    def has_ended(self) -> bool:
        """Whether the service's process has ended. What it last left can still be read."""
        return self._opened().has_ended

    def statistics(self) -> _native.Statistics:
        """Counts, and the team. `manager_pid` is the service's."""
        return self._opened().statistics()

    def last_step(self) -> _native.StepResult | None:
        """The last call of step() of any host; None if there was none.

        It has `status`, `counted`, `step`, `attempt`, `loss`, `samples`, `participants`, `tries` and the times; other
        fields have their defaults.
        """
        return self._opened().last_step()

    def next_step(self, timeout: float | None = None) -> _native.StepResult | None:
        """The first call of step() that this has not returned yet; the first time, the first one since observe().

        Waits for one for at most `timeout` seconds (None: for ever), and returns None then. It comes up to 20 ms after
        the step. The session has the last 256 calls: older ones are left out. Raises SessionError when the service has
        ended and all were returned.
        """
        return self._opened().next_step(math.inf if timeout is None else timeout)

    def parameters(self, timeout: float = 10.0) -> ParameterCopy:
        """Copies of all parameters, never half written.

        The copy is taken during an attempt, or while no host drives the session, and again if that has changed
        meanwhile. At other times a host may be writing. Raises SessionError: there was no such time within `timeout`
        seconds, or the service has ended. What a host that died has left half written is copied as it is;
        `Manager.unfinished` of the next host says so.
        """
        version, step, places = self._opened().parameters(timeout)
        tensors = {p.name: tensor_over(p.memory, p.dtype, p.shape, p.strides) for p in places}
        return ParameterCopy(version, step, tensors)

    def close(self) -> None:
        """Gives up the session's memory. Idempotent."""
        self._native = None

    def __enter__(self) -> Observer:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


def observe(service: str | os.PathLike[str] = "", *, timeout: float = 10.0) -> Observer:
    """Watches the session of a service (`accelmgr serve`), named as for `attach()`.

    Any number of processes may, besides the one host that drives the session, and while hosts come and go. The service
    hands out its memory for reading alone: the kernel refuses to map it writable. It does not know its observers, and
    nothing waits for them: one that is stopped or killed changes no step. A process of the service's user can still get
    at that memory by way of /proc, as it could trace the service.

    Gradients are not there for observers: nothing in the session says when a host zeroes or clips them.

    timeout: seconds to wait for the service's answer. Raises SessionError: there is no service, or it is of another
    build.
    """
    return Observer(_native.Observer.attach(arguments.socket_of(service), timeout))
