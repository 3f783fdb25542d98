# Runs in: the host.
"""The host's side of inner steps: what it orders, and how it gets the model back.

Committed inner steps that the host has no parameters of are *ahead*. When a runner is lost that has them, the run goes
back to the last sync, and makes them again: with the same elements, generators, buffers and learning rates.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import itertools
import logging
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from accelmgr import _native
from accelmgr._changes.buffers import alike
from accelmgr._changes.grown_buffers import Forms
from accelmgr._changes.kept_attributes import MISSING, kept_attributes
from accelmgr._memory.tensors import write
from accelmgr._updates.inner import (
    OPTIMIZERS,
    Numbers,
    Order,
    Outcome,
    Shelf,
    checksums,
    numbers_of,
    outcome,
    parameters_of,
)
from accelmgr._updates.joint_update import SharedParameters
from accelmgr._updates.optimizer_pickling import SentOptimizer
from accelmgr.errors import ManagerLost, ModelError, RunnerError, RunnerLost, SessionError, UsageError

if TYPE_CHECKING:
    from accelmgr._host.inner_driver import InnerDriver

logger = logging.getLogger("accelmgr")

MOST_RETURNS = 3
"""The run goes back at most this often in a row without a further step."""

_numbers = itertools.count(1)


@dataclasses.dataclass(frozen=True)
class Standing:
    """A place that a run can go back to."""

    state: str
    """Counters, generators and the state of the data source, as Handle.continuation() gives them."""
    elements: int
    """How many elements committed steps have consumed."""
    kept: Forms
    """Attributes of modules that are kept as buffers are."""


def _differs(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return True  # A learning rate in a tensor is written in place.
    return bool(one != other)


def _copied(numbers: Numbers) -> Numbers:
    plain = (bool, int, float, str, type(None))
    return {name: value if isinstance(value, plain) else copy.deepcopy(value) for name, value in numbers.items()}


class _Lost(Exception):
    """A lost process had made steps that are ahead."""


class InnerSteps:
    """The inner steps of one optimizer. The manager drops it when a step of another kind follows."""

    def __init__(self, manager: InnerDriver, optimizer: torch.optim.Optimizer) -> None:
        self._manager: InnerDriver = weakref.proxy(manager)
        self.optimizer = optimizer
        self._number = next(_numbers)
        OPTIMIZERS[self._number] = optimizer
        self._sent: SentOptimizer | None = None  # For processes that are no forks.
        self._orders: dict[int, tuple[Order, list[Numbers]]] = {}
        """The orders since the last sync, with all hyperparameters then; by the number of steps committed before."""
        self._reached = 0
        """How many steps were committed, including steps that the session has lost by going back."""
        self._shelves: dict[int, Shelf] = {}  # By rank.
        self._shared: SharedParameters | None = None
        self._manager_pid = self._replacements = 0  # As they were when runners last got the optimizer.
        self._trained: list[torch.Tensor] = []  # The parameters that the runners have, group by group.
        self._sizes: list[int] = []  # How many each group has.
        self._parameters: list[tuple[int, int]] = []  # Their versions when they last went to the runners.
        self._is_taking = False  # A sync has begun to write here.
        self._repeated = 0  # Steps that were made again since the last result.
        self._note_sync()

    @property
    def _steps(self) -> int:
        return self._manager.counts().steps

    @property
    def ahead(self) -> int:
        """How many committed steps are missing in the parameters of this process."""
        return max(self._steps, self._reached) - self.synced_step

    # What this process has

    def _note_sync(self) -> None:
        """Notes that this process has the parameters, buffers and optimizer's state of the last committed step."""
        model = self._manager.model
        assert model is not None
        self._standing = self._manager.standing()
        self.synced_step = self._reached = self._steps
        self._orders.clear()
        self._buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
        self._kept = [
            (owner, key, value.clone() if isinstance(value := owner.get(key, MISSING), torch.Tensor) else value)
            for _, owner, key in kept_attributes(model, self._standing.kept)
        ]
        _, self._state = self._versions()

    def _versions(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Object and version of each parameter, and of each tensor of the optimizer's state."""
        parameters = parameters_of(self.optimizer)
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        return (
            [(id(each), each._version) for each in parameters],
            [(id(each), each._version if isinstance(each, torch.Tensor) else 0) for each in states],
        )

    # Processes

    def is_stale(self) -> bool:
        """Whether the processes do not have the optimizer as it is here: its groups and its state."""
        sizes = [len(group["params"]) for group in self.optimizer.param_groups]
        if self._manager_pid == 0 or sizes != self._sizes:
            return True
        return self._versions()[1] != self._state

    def are_others(self) -> bool:
        """Whether a process has taken the place of one that had all steps."""
        counts = self._manager.counts()
        return (counts.manager_pid, counts.replacements) != (self._manager_pid, self._replacements)

    @property
    def _team(self) -> list[int]:
        return [runner.rank for runner in self._manager.counts().runners]

    def bring_optimizer(self) -> None:
        """Gives the processes the optimizer as it is here, unless they have it so."""
        if not self.is_stale():
            return
        if self._manager.forks:
            return self._manager.refresh()
        self.sync()
        self._manager_pid = 0  # order() sends it.

    def renew(self, has_given_up: bool = False) -> None:
        """Gives all processes what this one has, and makes steps that are ahead again, unless a survivor has them.

        has_given_up: the manager process replaces no runner any more.
        """
        if self.ahead > 0:
            self._take_from_survivor()
        if self.ahead > 0 or (has_given_up and not self._manager.forks):
            return self.go_back()
        if self._manager.forks:
            self._manager.refresh()
        self._meet()

    def _meet(self) -> None:
        """Called when the processes have optimizer and parameters as they are here, or get them with the next step."""
        if not self._manager.forks:
            self._number = next(_numbers)
            self._sent = self._manager.sent_optimizer(self.optimizer)
        counts = self._manager.counts()
        self._manager_pid, self._replacements = counts.manager_pid, counts.replacements
        self._base = counts.steps
        self._known: list[Numbers] = [numbers_of(group) for group in self.optimizer.param_groups]
        self._changed: list[set[str]] = [set() for _ in self._known]
        self._trained = parameters_of(self.optimizer)
        self._sizes = [len(group["params"]) for group in self.optimizer.param_groups]
        self._shared = self._manager.shared_parameters(self.optimizer)
        self._state = self._versions()[1]
        self._manager.keep_elements(lambda: self._standing.elements)

    # Steps

    def order(self, clip_grad_norm: float | None) -> Order:
        """Tells the runners of the next step."""
        if self._is_taking:  # A signal handler has raised in it.
            self.sync()
        counts = self._manager.counts()
        self._reached = max(self._reached, counts.steps)
        if (counts.manager_pid, counts.replacements) != (self._manager_pid, self._replacements):
            if self.ahead > 0 or counts.manager_pid == self._manager_pid:
                self.renew()
            else:
                self._meet()
                if self._manager.forks:  # They were forked before: they may have other numbers.
                    self._changed = list(map(set, self._known))
        if counts.steps < self._reached:
            self._make_again()
        parameters, _ = self._versions()
        if self._reached == self.synced_step:
            self._parameters = parameters
        elif parameters != self._parameters:
            raise UsageError(
                f"parameters were written while the runners are {self.ahead} inner steps ahead, and the next sync() "
                "would overwrite that: call manager.sync() before"
            )
        present = self._note_changed()
        order = self._order(present, clip_grad_norm, self._reached == self.synced_step, self._reached)
        order.repeated = self._repeated
        self._orders[self._reached] = order, [_copied(numbers) for numbers in present]
        self._manager.publish_order(order)
        return order

    def _note_changed(self) -> list[Numbers]:
        """Notes which hyperparameters the host has changed since the processes began. Returns all present ones."""
        present = [numbers_of(group) for group in self.optimizer.param_groups]
        for numbers, known, changed in zip(present, self._known, self._changed, strict=False):
            changed.update(name for name, value in numbers.items() if name not in known or _differs(value, known[name]))
        return present

    def _order(self, numbers: list[Numbers], clip_grad_norm: float | None, loads: bool, steps: int) -> Order:
        """steps: how many were committed before."""
        groups = [
            {name: value for name, value in group.items() if name in changed}
            for group, changed in zip(numbers, self._changed, strict=True)
        ]
        if self._shared is not None and loads:
            self._shared.load()
        division = self._shared.division if self._shared is not None else None
        sent = self._sent.address if self._sent is not None else ""
        return Order(self._number, steps - self._base, groups, clip_grad_norm, loads, division, sent)

    def counted(self, result: _native.StepResult) -> None:
        """Called when the step that was ordered last was committed."""
        self._reached = max(self._reached, result.step)
        self._repeated = 0
        if self._sent is not None:
            self._sent.close()  # Every runner has read it.
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # A scheduler looks whether it has stepped.

    def _take_from_survivor(self) -> None:
        """Syncs with a runner that has made all steps, if there is one, so that no step is made again."""
        if self._shared is not None or self._steps < self._reached:  # Each runner has a part; or the run went back.
            return
        if self._manager.counts().manager_pid != self._manager_pid:
            return
        made = self._steps - self._base
        for rank in self._team:
            with contextlib.suppress(RunnerError, SessionError, ModelError, UsageError):
                shelf = self._shelves.setdefault(rank, Shelf())
                found = shelf.open(self._manager.call(functools.partial(outcome, made, shelf.address), rank=rank))
                logger.info("rank %d has all inner steps: the host takes parameters and state from it", rank)
                return self._take(found)

    def go_back(self) -> None:
        """Goes back to the last sync, and makes the steps since then again."""
        self._note_changed()
        changed, ahead = self._changed, self.ahead
        self._reached = max(self._reached, self._steps)
        for _ in range(MOST_RETURNS):
            if ahead:
                logger.warning("%d inner steps since the last sync were lost with a runner, and are made again", ahead)
            for buffer, value in self._buffers:
                write(buffer, value)
            for owner, key, value in self._kept:
                if value is MISSING:
                    owner.pop(key, None)
                else:
                    owner[key] = value.clone() if isinstance(value, torch.Tensor) else value
            try:
                self._manager.go_back_to(self._standing)
                self._meet()
                self._changed = changed
                return self._make_again()
            except (RunnerError, SessionError, RunnerLost, ManagerLost) as error:
                lost = error
        raise SessionError(f"processes are lost again and again: {lost}") from lost

    def _make_again(self) -> None:
        """Makes the steps again that were committed before the run went back, with their hyperparameters."""
        while (steps := self._steps) < self._reached:
            before, numbers = self._orders[steps]
            self._manager.repeat_inner(self._order(numbers, before.clip_grad_norm, before.loads, steps))
            self._repeated += 1

    def sync(self) -> None:
        """Gives this process the parameters and the optimizer's state that the runners have."""
        if self.ahead == 0:
            return
        for _ in range(MOST_RETURNS):
            if self.are_others():
                self.go_back()
            self._make_again()
            made = self._steps - self._base
            try:
                self._check_alike(made)
                return self._take(self._outcome(made))
            except _Lost as error:
                lost = error
            self.go_back()
        raise SessionError(f"sync(): processes are lost again and again: {lost}") from lost

    def _ask(self, function: Callable[[Any], Any], rank: int) -> Any:
        """Manager.call(). Raises _Lost if the runner does not answer, or has not made all steps."""
        try:
            return self._manager.call(function, rank=rank)
        except (RunnerError, SessionError) as error:
            raise _Lost(str(error)) from error
        except (ModelError, UsageError) as error:  # UsageError: the rank has left the team.
            if self.are_others():
                raise _Lost(str(error)) from error
            raise

    def _outcome(self, made: int) -> Outcome:
        """The outcome with tensors, which are valid until runners make the next step or put others there."""
        found = {}
        for rank in self._team if self._shared is not None else self._team[:1]:
            shelf = self._shelves.setdefault(rank, Shelf())
            found[rank] = shelf.open(self._ask(functools.partial(outcome, made, shelf.address), rank))
        first = next(iter(found.values()))
        if self._shared is None:
            return first
        states = [found[rank].state[index] for index, rank in enumerate(self._shared.division.ranks)]
        return Outcome(self._shared.values, states, first.groups)

    def _take(self, found: Outcome) -> None:
        self._note_changed()
        self._is_taking = True
        groups = self.optimizer.param_groups
        for parameter, value, state in zip(self._trained, found.values, found.state, strict=True):
            write(parameter, value)
            own = self.optimizer.state[parameter] if state else {}
            for name, taken in state.items():
                former = own.get(name)
                if alike(former, taken):
                    write(former, taken)
                else:
                    own[name] = taken.clone() if isinstance(taken, torch.Tensor) else taken
        for group, numbers, known, changed in zip(groups, found.groups, self._known, self._changed, strict=False):
            own = {name: value for name, value in numbers.items() if name not in changed}
            group.update(own)  # Some optimizers keep a state there.
            known.update(own)
        self._note_sync()
        self._is_taking = False

    def _check_alike(self, made: int) -> None:
        """Raises SessionError unless all ranks have the same bits."""
        ranks = self._team
        if len(ranks) < 2 or self._shared is not None:  # Shared parameters cannot differ.
            return
        first, *others = (self._ask(functools.partial(checksums, made), rank) for rank in ranks)
        for rank, other in zip(ranks[1:], others, strict=True):
            for parameter, one, another in zip(self._trained, first, other, strict=True):
                if one != another:
                    raise SessionError(
                        f"after step {self._steps} parameter '{self._name_of(parameter)}' has other values in rank "
                        f"{rank} than in rank {ranks[0]}: the optimizer computes otherwise in each process (random "
                        "numbers?). Call optimizer.step() in the host"
                    )

    def _name_of(self, parameter: torch.Tensor) -> str:
        named = self._manager.named_parameters()
        return next(name for name, own in named if own.data_ptr() == parameter.data_ptr())


def check_inner(optimizer: Any, parameters: list[torch.Tensor]) -> None:
    """Raises UsageError for an optimizer that makes no inner steps."""
    is_of_hivemind = any(kind.__module__.partition(".")[0] == "hivemind" for kind in type(optimizer).__mro__)
    if is_of_hivemind or not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(
            f"optimizer is a {type(optimizer).__name__}; runners step with an optimizer of torch.optim. What averages "
            "with others stays in the host: call its step() there"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UsageError("LBFGS evaluates the loss several times in a step: call optimizer.step() in the host")
    own = set(map(id, parameters))
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) not in own:
                raise UsageError(
                    f"the optimizer has a tensor of shape {list(parameter.shape)} in group {index} which is not a "
                    "parameter of this manager; make the optimizer from manager.parameters()"
                )
