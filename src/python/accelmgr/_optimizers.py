"""Sees the optimizers of this process step, and refuses those that would train a manager's model wrongly, silently."""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from accelmgr.errors import UsageError

LBFGS = (
    "LBFGS evaluates the loss several times in one step, but each manager.step() computes on other elements. Use an "
    "optimizer that takes one step per gradient"
)
SCALER = os.path.join("torch", "amp", "grad_scaler.py")
LOOK = 6  # Frames between GradScaler.step() and the hook, and a few more.

_parameters: weakref.WeakKeyDictionary[Any, Callable[[], Iterable[torch.Tensor]]] = weakref.WeakKeyDictionary()
_checked: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
_watching = False
_lock = threading.Lock()


def watch(owner: object, parameters: Callable[[], Iterable[torch.Tensor]]) -> None:
    """From now on optimizers are checked; while `owner` lives, with its `parameters()`, which must not refer to it."""
    global _watching
    _parameters[owner] = parameters
    _checked.clear()
    with _lock:
        if not _watching:
            register_optimizer_step_pre_hook(_before_step)
            _watching = True


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


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if optimizer in _checked and not _scales_gradients():
        return
    has_closure = len(args) > 1 or kwargs.get("closure") is not None  # It may compute gradients.
    own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    managed = [list(parameters()) for parameters in list(_parameters.values())]
    ids = {id(parameter) for parameters in managed for parameter in parameters}
    if any(id(parameter) in ids for parameter in own):
        if isinstance(optimizer, torch.optim.LBFGS):
            raise UsageError(LBFGS)
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
    _checked.add(optimizer)
