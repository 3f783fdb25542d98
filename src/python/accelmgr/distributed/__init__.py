"""Rank and world size of this process, and collectives of tensors with the other ranks.

Works without any configuration (serial: rank 0 of 1), in a process that spawn(), `accelmgr spawn` or torchrun started,
after initialize(), and over a torch.distributed process group that the user has made. The names, arguments and defaults
are those of ignite.distributed.

The first call that needs the context looks for it, in this order: initialize(); torch.distributed, if the program has
initialized it; the environment that a launcher has set (RANK, WORLD_SIZE, ...); serial.

Call these functions from one thread at a time. Collectives release the interpreter's lock, block for at most the
context's timeout, and raise CollectiveError (errors of torch over a process group of torch.distributed). With one
process they return their input. No collective changes its input.
"""

from __future__ import annotations

from accelmgr._launch.processes import SpawnContext
from accelmgr._native import Group
from accelmgr.distributed._collectives import (
    all_gather,
    all_gather_tensors_with_shapes,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    new_group,
    one_rank_first,
    one_rank_only,
    reduce_scatter,
)
from accelmgr.distributed._context import (
    available_backends,
    backend,
    device,
    finalize,
    get_local_rank,
    get_nnodes,
    get_node_rank,
    get_nproc_per_node,
    get_rank,
    get_world_size,
    has_hvd_support,
    has_native_dist_support,
    has_xla_support,
    hostname,
    initialize,
    is_available,
    model_name,
    registered_computation_models,
    set_local_rank,
    show_config,
    sync,
)
from accelmgr.distributed._spawn import spawn

__all__ = [
    "Group",
    "SpawnContext",
    "all_gather",
    "all_gather_tensors_with_shapes",
    "all_reduce",
    "all_to_all",
    "available_backends",
    "backend",
    "barrier",
    "broadcast",
    "device",
    "finalize",
    "get_local_rank",
    "get_nnodes",
    "get_node_rank",
    "get_nproc_per_node",
    "get_rank",
    "get_world_size",
    "has_hvd_support",
    "has_native_dist_support",
    "has_xla_support",
    "hostname",
    "initialize",
    "is_available",
    "model_name",
    "new_group",
    "one_rank_first",
    "one_rank_only",
    "reduce_scatter",
    "registered_computation_models",
    "set_local_rank",
    "show_config",
    "spawn",
    "sync",
]
