"""A machine with several accelerators as one fast device, for an optimizer in this process.

    manager = accelmgr.Manager(model, dataset, nprocs=2, batch_size_per_device=8)
    optimizer = torch.optim.AdamW(model.parameters())
    for result in manager.steps(100):
        optimizer.step()
        manager.zero_grad()
"""

from __future__ import annotations

import torch  # noqa: F401  (libtorch, which the extension module is linked to)

from accelmgr._native import (
    CheckpointWritten,
    FailureCause,
    Resumed,
    RunnerStatistics,
    Statistics,
    StepResult,
)
from accelmgr.errors import (
    CheckpointError,
    CollectiveError,
    ConfigError,
    DataEnd,
    DataError,
    Error,
    ManagerLost,
    ModelError,
    Nonfinite,
    RunnerError,
    RunnerLost,
    SessionError,
    SpawnError,
    StepError,
    StepTimeout,
    SystemError,
    UsageError,
)
from accelmgr.manager import Manager
from accelmgr.compat.tpu_manager import TPUManager

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "CheckpointWritten",
    "CollectiveError",
    "ConfigError",
    "DataEnd",
    "DataError",
    "Error",
    "FailureCause",
    "Manager",
    "ManagerLost",
    "ModelError",
    "Nonfinite",
    "Resumed",
    "RunnerError",
    "RunnerLost",
    "RunnerStatistics",
    "SessionError",
    "SpawnError",
    "Statistics",
    "StepError",
    "StepResult",
    "StepTimeout",
    "SystemError",
    "TPUManager",
    "UsageError",
]
