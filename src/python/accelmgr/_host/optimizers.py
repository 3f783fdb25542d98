# Runs in: the host.
"""Sees the optimizers of this process step. Refuses those that would train a manager's model wrongly, with no error."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from accelmgr import _native
from accelmgr.errors import UsageError

LBFGS = (
    "LBFGS evaluates the loss several times in one step, but each manager.step() computes on other elements. Start the "
    "manager with data={'keep_last_step': True}, and let all evaluations of a step but the first call "
    "manager.step(repeat=True)"
)
SPARSE_ADAM = (
    "SparseAdam takes sparse gradients, and leaves alone what a batch has not used; the gradients of a manager are "
    "dense, also those of an Embedding with sparse=True. Use Adam, or Adagrad or SGD, which change only what has a "
    "gradient"
)
DP_OPTIMIZER = (
    "a DPOptimizer clips the gradient of each sample, which it reads from parameter.grad_sample in the process that "
    "computes; runners give the mean gradient alone. Train with opacus in one process, or clip the mean gradient"
)
LBFGS_FILE = os.path.join("torch", "optim", "lbfgs.py")
SCALER = os.path.join("torch", "amp", "grad_scaler.py")
HIVEMIND = "hivemind.optim.state_averager"
LOOK = 6  # Frames between GradScaler.step() and the hook, and a few more.


class Update:
    """Marks writes of optimizers to a service's parameters: the service knows if this process is killed in one."""

    def __init__(self, handle: _native.Handle) -> None:
        self._handle = handle
        self._is_open = self._has_closure = False

    def begin(self, has_closure: bool) -> None:
        if self._is_open or self._handle.is_writing:
            return
        self._is_open, self._has_closure = True, has_closure  # First: a signal handler may raise behind it.
        try:
            self._handle.begin_writing()
        except UsageError:  # Another thread makes a step meanwhile.
            self._is_open = False

    def end(self) -> None:
        if self._is_open:
            self._is_open = False
            self._handle.end_writing(whole=False)

    @contextlib.contextmanager
    def interrupted(self) -> Iterator[None]:
        """For a step that a closure makes, or that follows an optimizer which has raised."""
        goes_on = self._is_open and self._has_closure
        self.end()
        try:
            yield
        finally:
            if goes_on:
                self.begin(has_closure=True)


@dataclasses.dataclass
class _Managed:
    parameters: Callable[[], Iterable[torch.Tensor]]
    keeps_last_step: bool
    update: Update | None


_managed: weakref.WeakKeyDictionary[Any, _Managed] = weakref.WeakKeyDictionary()
_evaluations: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
"""How often an LBFGS has evaluated its closure in its present step."""
_checked: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
_updates: weakref.WeakKeyDictionary[torch.optim.Optimizer, list[Update]] = weakref.WeakKeyDictionary()
"""The updates of the services whose parameters an optimizer has."""
_watching = _marks_hivemind = False
_lock = threading.Lock()


def check_kind(optimizer: Any, keeps_last_step: bool) -> None:
    """Raises UsageError for an optimizer that gradients of a manager are not made for."""
    if isinstance(optimizer, torch.optim.LBFGS) and not keeps_last_step:
        raise UsageError(LBFGS)
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise UsageError(SPARSE_ADAM)
    if any(kind.__name__ == "DPOptimizer" for kind in type(optimizer).__mro__):
        raise UsageError(DP_OPTIMIZER)


def watch(
    owner: object,
    parameters: Callable[[], Iterable[torch.Tensor]],
    keeps_last_step: bool,
    update: Update | None = None,
) -> None:
    """From now on optimizers are checked; while `owner` lives, with its `parameters()`, which must not refer to it.

    update: of a service.
    """
    global _watching
    _managed[owner] = _Managed(parameters, keeps_last_step, update)
    _checked.clear()
    with _lock:
        if not _watching:
            register_optimizer_step_pre_hook(_before_step)
            register_optimizer_step_post_hook(_after_step)
            _watching = True


def mark_hivemind() -> None:
    """Sees what hivemind copies into parameters: its optimizer works on copies, where no hook of torch looks."""
    global _marks_hivemind
    averager = getattr(sys.modules.get(HIVEMIND), "TrainingStateAverager", None)
    if _marks_hivemind or averager is None:
        return
    _marks_hivemind = True
    for name in ("_apply_optimizer_parameters_", "_apply_averaging_results_"):
        if (write := getattr(averager, name, None)) is not None:
            setattr(averager, name, _marked(write))


def _marked(write: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(write)
    def marked(averager: Any, *args: Any, **kwargs: Any) -> Any:
        written = {id(parameter) for parameter in averager.main_parameters}
        updates = [
            manager.update
            for manager in list(_managed.values())
            if manager.update is not None and any(id(parameter) in written for parameter in manager.parameters())
        ]
        for update in updates:
            update.begin(has_closure=False)
        try:
            return write(averager, *args, **kwargs)
        finally:
            for update in updates:
                update.end()

    return marked


def _scales_gradients() -> bool:
    """Whether a GradScaler makes this step: it has divided the gradients by its scale."""
    frame = sys._getframe(2)
    for _ in range(LOOK):
        if frame is None:
            return False
        if frame.f_code.co_filename.endswith(SCALER):
            scaler = frame.f_locals.get("self")
            return scaler is not None and bool(scaler.is_enabled()) and float(scaler.get_scale()) != 1.0
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _lbfgs_of_call() -> torch.optim.Optimizer | None:
    """The LBFGS whose step() calls this, through the user's closure."""
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_filename.endswith(LBFGS_FILE) and frame.f_code.co_name == "step":
            optimizer: torch.optim.Optimizer | None = frame.f_locals.get("self")
            return optimizer
        frame = frame.f_back  # type: ignore[assignment]
    return None


def check_evaluation(repeat: bool) -> None:
    """Raises UsageError if LBFGS evaluates its closure a second time in a step, but not on the same elements."""
    if not _evaluations or (optimizer := _lbfgs_of_call()) is None:
        return
    if _evaluations.get(optimizer, 0) > 0 and not repeat:
        raise UsageError(
            "LBFGS evaluates its closure again, and must do that on the elements of its first evaluation: call "
            "manager.step(repeat=True) in all evaluations of a step but the first"
        )
    _evaluations[optimizer] = _evaluations.get(optimizer, 0) + 1


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    has_closure = len(args) > 1 or kwargs.get("closure") is not None  # It may compute gradients.
    _check(optimizer, has_closure)
    for update in _updates.get(optimizer, ()):
        update.begin(has_closure)


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for update in _updates.get(optimizer, ()):
        update.end()


def _check(optimizer: torch.optim.Optimizer, has_closure: bool) -> None:
    if optimizer in _evaluations:
        _evaluations[optimizer] = 0
    if optimizer in _checked and not _scales_gradients():
        return
    own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    managers = list(_managed.values())
    managed = [list(manager.parameters()) for manager in managers]
    ids = {
        id(parameter): manager
        for manager, parameters in zip(managers, managed, strict=True)
        for parameter in parameters
    }
    owners = [ids[id(parameter)] for parameter in own if id(parameter) in ids]
    if owners:
        check_kind(optimizer, all(manager.keeps_last_step for manager in owners))
        if isinstance(optimizer, torch.optim.LBFGS):
            _evaluations[optimizer] = 0
        if _scales_gradients():
            raise UsageError(
                "a GradScaler makes this step, and has divided the gradients by its scale; but runners give "
                "gradients of the loss itself, also with runners.autocast fp16, which scales by its own. Call "
                "optimizer.step()"
            )
    elif (
        not has_closure
        and all(parameter.grad is None for parameter in own)
        and any(
            [parameter.shape for parameter in own] == [parameter.shape for parameter in parameters]
            for parameters in managed
        )
    ):
        raise UsageError(
            "this optimizer has parameters like those of a manager's model, but they are others, and none has a "
            "gradient: it changes nothing. Make it from manager.parameters(), or from the parameters of the model "
            "that was passed"
        )
    _updates[optimizer] = [
        manager.update
        for manager, parameters in zip(managers, managed, strict=True)
        if manager.update is not None and not {id(p) for p in parameters}.isdisjoint(map(id, own))
    ]
    _checked.add(optimizer)
