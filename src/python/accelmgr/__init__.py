"""A machine with several accelerators as one fast device, for an optimizer in this process.

manager = accelmgr.Manager(model, dataset, nprocs=2, batch_size_per_device=8)
optimizer = torch.optim.AdamW(model.parameters())
for result in manager.steps(100):
    optimizer.step()
    manager.zero_grad()
"""

from __future__ import annotations

from accelmgr._process import torch_version  # noqa: F401  (checks that torch is there)

# isort: split
from accelmgr._host.pending import PendingSteps
from accelmgr._native import VERSION as _VERSION
from accelmgr._native import (
    CheckpointWritten,
    FailureCause,
    Resumed,
    RunnerStatistics,
    Statistics,
    StepResult,
)
from accelmgr.compat.tpu_manager import TPUManager
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
from accelmgr.manager import Manager, attach
from accelmgr.observer import Observer, ParameterCopy, observe

__version__ = _VERSION

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
    "Observer",
    "ParameterCopy",
    "PendingSteps",
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
    "attach",
    "observe",
]
