"""Optimizers that cannot train through a manager are found at their step, also where nobody asks check_optimizer()."""

from __future__ import annotations

import dataclasses
import os
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from accelmgr.errors import UsageError

if TYPE_CHECKING:
    from accelmgr.manager import Manager

LBFGS = "LBFGS evaluates the loss several times in one step; a manager's step has one batch and no closure"

_managers: weakref.WeakSet[Manager] = weakref.WeakSet()
_served: weakref.WeakSet[Manager] = weakref.WeakSet()
"""Those over whose parameters an optimizer has stepped: another one beside it is of another model."""
_is_looking = False


@dataclasses.dataclass
class _Stepped:
    """How a manager was found when an optimizer stepped on tensors that only look like its parameters."""

    manager: weakref.ref[Manager]
    steps: int
    values: list[float]


# None: nothing is to be said of it.
_looked_at: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Stepped | None] = weakref.WeakKeyDictionary()


def look_after(manager: Manager) -> None:
    """From now on, until the manager is stopped, LBFGS over its parameters is refused when it steps.

    So is, as long as none has stepped over these, an optimizer over a copy of them, at its second step: when the
    manager made a step in between and the first one has reached no parameter. One whose results are carried over
    (hivemind's offloaded one) is left alone.
    """
    global _is_looking
    _managers.add(manager)
    if not _is_looking:
        register_optimizer_step_pre_hook(_before_step)
        _is_looking = True


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    before = _looked_at.get(optimizer)
    if optimizer in _looked_at and before is None:
        return
    stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    ids = {id(parameter) for parameter in stepped}
    managers = [manager for manager in list(_managers) if not manager._stopped and manager._owner == os.getpid()]
    own = [manager for manager in managers if any(id(parameter) in ids for parameter in manager.parameters())]
    if own:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise UsageError(LBFGS)
        _served.update(own)
        _looked_at[optimizer] = None
    elif before is None:
        shapes = [parameter.shape for parameter in stepped]
        for manager in managers:
            if manager not in _served and [parameter.shape for parameter in manager.parameters()] == shapes:
                _looked_at[optimizer] = _state_of(manager)
    elif (manager_or_none := before.manager()) is not None and manager_or_none in managers:
        now = _state_of(manager_or_none)
        if manager_or_none in _served:
            _looked_at[optimizer] = None
        elif now.steps > before.steps and now.values == before.values:
            raise UsageError(
                "this optimizer has tensors that look like the manager's parameters and are others: its last step "
                "changed none of them. Make it from manager.parameters(), or from those of the model that was passed"
            )
        elif now.values != before.values:
            _looked_at[optimizer] = None


def _state_of(manager: Manager) -> _Stepped:
    values = [float(parameter.detach().sum()) for parameter in manager.parameters()]
    return _Stepped(weakref.ref(manager), manager.statistics().steps, values)
