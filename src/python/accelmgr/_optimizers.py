"""Optimizers that cannot train through a manager are found at their step, also where nobody asks check_optimizer()."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from accelmgr.errors import UsageError

if TYPE_CHECKING:
    from accelmgr.manager import Manager

LBFGS = "LBFGS evaluates the loss several times in one step; a manager's step has one batch and no closure"

_managers: weakref.WeakSet[Manager] = weakref.WeakSet()
_is_looking = False


def look_after(manager: Manager) -> None:
    """From now on LBFGS over its parameters is refused when it steps, until the manager is stopped."""
    global _is_looking
    _managers.add(manager)
    if not _is_looking:
        register_optimizer_step_pre_hook(_before_step)
        _is_looking = True


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if not isinstance(optimizer, torch.optim.LBFGS):
        return
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for manager in list(_managers):
        if not manager._stopped and any(id(parameter) in stepped for parameter in manager.parameters()):
            raise UsageError(LBFGS)
