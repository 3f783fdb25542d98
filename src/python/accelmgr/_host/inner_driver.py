# Runs in: the host.
"""Drives a session whose runners may step with an optimizer themselves."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import torch

from accelmgr import _native
from accelmgr._host import session_updates
from accelmgr._host import start_method as start_methods
from accelmgr._host.delivery import Delivery
from accelmgr._host.driver import Driver
from accelmgr._host.inner import InnerSteps, Standing, check_inner
from accelmgr._host.session_updates import SessionUpdates
from accelmgr._updates.inner import Order
from accelmgr._updates.joint_update import SharedParameters, is_divisible
from accelmgr._updates.optimizer_pickling import SentOptimizer
from accelmgr.errors import UsageError


class InnerDriver(Driver):
    """A class derived from it starts and ends the processes. What InnerSteps calls has no underscore."""

    _delivery: Delivery
    _method: str  # The start method of the present processes.
    _inner: InnerSteps | None
    _updates: SessionUpdates | None = None  # In place of _inner, where runners cannot have an optimizer.
    _adopts = True  # Takes over the state that an earlier host of a service has left.

    def refresh(self) -> None:
        """See Manager."""
        raise NotImplementedError

    def call(self, function: Callable[[torch.nn.Module], Any], rank: int = 0) -> Any:
        """See Manager."""
        raise NotImplementedError

    def counts(self) -> _native.Statistics:
        """As statistics(), without memory."""
        return self._handle.statistics(memory=False)

    def go_back_to(self, standing: Standing) -> None:
        """Starts processes that go on from `standing`."""
        raise NotImplementedError

    def _finish_renewal(self, call: str) -> bool:
        """Finishes a replacement of all processes that an exception has cut short. Returns whether there was one."""
        raise NotImplementedError

    def _check(self) -> None:
        self._bound.check(takes_gradients=self._inner is None)  # After Ctrl-C a runner may still apply them.

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._check_idle("zero_grad")
        if self._inner is None:
            super().zero_grad(set_to_none)

    def _check_thread(self) -> None:
        if self._delivery.feed is not None and self._delivery.feed.is_bound:
            raise UsageError(
                "begin_steps(): only one thread can read the dataset (SQLite?), and another one would make the steps: "
                "open what is bound to a thread where it is used first, in __getitem__() or __iter__(), or call steps()"
            )

    def _begin_kind(self, optimizer: torch.optim.Optimizer | None) -> None:
        if self._inner is not None and self._inner.optimizer is not optimizer:
            self.sync()
            self._inner = None
            self.publish_order(None)
            self.zero_grad()  # They were applied.
        if self._updates is not None and self._updates.optimizer is not optimizer:
            self._updates.release()
            self._updates = None
        if optimizer is None or self._updates is not None:
            return
        if self._inner is None:
            check_inner(optimizer, self._bound.leaves())
            if why_not := self._why_not_inner():
                return self._begin_updates(optimizer, why_not)
            self._inner = InnerSteps(self, optimizer)
        self._inner.bring_optimizer()

    def _begin_updates(self, optimizer: torch.optim.Optimizer, why_not_inner: str) -> None:
        if reason := session_updates.why_not(optimizer):
            raise session_updates.refusal(optimizer, reason, why_not_inner)
        self._updates = SessionUpdates(self._handle, self._bound.leaves(), optimizer, self._adopts)
        self._adopts = False

    def _session_update(self, clip_grad_norm: float | None) -> session_updates.Numbers | None:
        if self._updates is not None and self._updates.handle is not self._handle:  # There is another session.
            self._begin_updates(self._updates.optimizer, "")
        return self._updates.numbers(clip_grad_norm) if self._updates is not None else None

    def _why_not_inner(self) -> str:
        if self._model is None:
            return "the model is no module that was passed to this manager"
        device = self._handle.device
        return f"runners.device is {device}" if device in start_methods.UNFORKABLE_DEVICES else ""

    @property
    def forks(self) -> bool:
        """Whether the processes are forks of this one."""
        return self._method == "fork"

    def sent_optimizer(self, optimizer: torch.optim.Optimizer) -> SentOptimizer:
        return SentOptimizer(optimizer, self._bound.leaves())

    def _order(self, optimizer: torch.optim.Optimizer | None, clip_grad_norm: float | None) -> Order | None:
        if (
            optimizer is not None and self._inner is None and self._updates is None
        ):  # There are other processes: _follow() has changed the model.
            self._begin_kind(optimizer)
        return self._inner.order(clip_grad_norm) if self._inner is not None else None

    def publish_order(self, order: Order | None) -> None:
        assert self._delivery.record is not None
        self._delivery.record.publish({("order",): pickle.dumps(order)})  # cloudpickle looks through all modules.

    def sync(self) -> None:
        self._check_idle("sync")
        if self._updates is not None:
            self._updates.sync()
        if self._inner is not None:
            self._finish_renewal("sync")
            with self._handle.alone("sync"):
                self._inner.sync()

    @property
    def synced_step(self) -> int:
        return self._inner.synced_step if self._inner is not None else super().synced_step

    def standing(self) -> Standing:
        """Where the run stands."""
        return Standing(self._handle.continuation(), self.counts().elements, self._delivery.grown)

    def shared_parameters(self, optimizer: torch.optim.Optimizer) -> SharedParameters | None:
        """Memory that the runners update together; None if each has parameters of its own."""
        handle = self._handle
        several = handle.device == "cpu" and len(self.counts().runners) > 1
        if not several or handle.team_shrinks or not handle.protects_parameters or not is_divisible(optimizer):
            return None  # A team that shrinks goes on with what a survivor has.
        return SharedParameters(handle, self._bound.leaves(), optimizer)

    def keep_elements(self, since: Callable[[], int]) -> None:
        """Keeps the elements from `since()` on: they may be asked for again."""
        if self._delivery.feed is not None:
            self._delivery.feed.follow(since)

    def repeat_inner(self, order: Order) -> None:
        """Raises the typed error of a step that is not committed."""
        made: list[_native.StepResult] = []
        self.publish_order(order)
        self._bound.send_changes()
        with self._waiting():
            self._handle.step(made, None, False, order.loads, False, (0, order.made))
        self._bound.show(made[-1].counted, True)
        made[-1].raise_for_status()

    def _note_counted(self, result: _native.StepResult) -> None:
        if self._inner is not None:
            self._inner.counted(result)
        if self._updates is not None:
            self._updates.counted()
