"""The context of accelmgr.distributed that the engine has: serial, or the ranks of a launcher or of initialize()."""

from __future__ import annotations

import pickle
from typing import Any

import cloudpickle
import torch

from accelmgr import _native
from accelmgr.errors import ConfigError, UsageError


class EngineContext:
    def backend(self) -> str | None:
        return _native.dist_backend()

    def rank(self) -> int:
        return _native.dist_rank()

    def world_size(self) -> int:
        return _native.dist_world_size()

    def local_rank(self) -> int:
        return _native.dist_local_rank()

    def nproc_per_node(self) -> int:
        return _native.dist_nproc_per_node()

    def nnodes(self) -> int:
        return _native.dist_nnodes()

    def node_rank(self) -> int:
        return _native.dist_node_rank()

    def device(self) -> torch.device:
        return torch.device(_native.dist_device())

    def finalize(self) -> None:
        _native.dist_finalize()

    def new_group(self, ranks: list[int], backend: str | None, pg_options: Any) -> Any:
        if pg_options is not None:
            raise ConfigError("new_group: pg_options are of torch.distributed's groups; there is none", "pg_options")
        return _native.dist_new_group(ranks, backend)

    def group_of(self, group: Any) -> Any:
        if group is None or isinstance(group, _native.Group):
            return group
        if isinstance(group, (list, tuple)):
            return list(group)
        raise UsageError(f"a group is a list of ranks or what new_group() returned; this is a {type(group).__name__}")

    def contains(self, group: Any) -> bool:
        if group is None:
            return True
        rank = self.rank()
        return bool(group.contains(rank) if isinstance(group, _native.Group) else rank in group)

    def barrier(self) -> None:
        _native.dist_barrier()

    def all_reduce(self, tensor: torch.Tensor, op: str, group: Any) -> torch.Tensor:
        return _native.dist_all_reduce(tensor, op, group)

    def all_gather(self, tensor: torch.Tensor, group: Any) -> torch.Tensor:
        return _native.dist_all_gather(tensor, group)

    def all_gather_objects(self, value: Any, group: Any) -> list[Any]:
        if isinstance(value, str):
            return list(_native.dist_all_gather_text(value, group))
        return [pickle.loads(data) for data in _native.dist_all_gather_bytes(cloudpickle.dumps(value), group)]

    def broadcast(self, tensor: torch.Tensor, src: int) -> torch.Tensor:
        return _native.dist_broadcast(tensor, src)

    def broadcast_object(self, value: Any, src: int) -> Any:
        data = cloudpickle.dumps(value) if self.rank() == src else b""
        return pickle.loads(_native.dist_broadcast_bytes(data, src))

    def reduce_scatter(self, tensor: torch.Tensor, op: str, group: Any) -> torch.Tensor:
        return _native.dist_reduce_scatter(tensor, op, group)

    def all_to_all(self, tensor: torch.Tensor, group: Any) -> torch.Tensor:
        return _native.dist_all_to_all(tensor, group)
