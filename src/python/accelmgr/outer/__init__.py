"""Machines far apart that train one model: rounds that count once, and for which no step waits.

import accelmgr.outer

with accelmgr.Manager(model, dataset) as manager:
    outer = accelmgr.outer.DiLoCo(manager, swarm="run-7@10.0.0.1:29500", every=100)
    for result in manager.steps(10_000, optimizer=inner):
        outer.step(result)
"""

try:
    import safetensors  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("accelmgr.outer needs safetensors: pip install 'accelmgr[outer]'") from error

# isort: split
from accelmgr.outer.diloco import DiLoCo
from accelmgr.outer.leased import Leased

__all__ = ["DiLoCo", "Leased"]
