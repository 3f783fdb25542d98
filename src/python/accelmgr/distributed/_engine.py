"""The context of the engine: serial, or the ranks of a launcher or of initialize()."""

from __future__ import annotations

import pickle
from typing import Any

import cloudpickle
import torch

from accelmgr import _native
from accelmgr._memory.tensors import dtype_name
from accelmgr.distributed import _devices, _torch
from accelmgr.errors import ConfigError, UsageError

# The engine takes tensors as addresses with dtype and shape.


def _dense(tensor: torch.Tensor, call: str) -> torch.Tensor:
    """The tensor detached, row-major and without gaps: a view if it is so already, else a copy."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{call}: a {type(tensor).__name__} was passed; it takes tensors")
    if tensor.is_quantized:
        raise UsageError(
            f"{call}: quantized tensors ({tensor.dtype}) are not supported; pass int_repr() and the parameters"
        )
    if tensor.is_nested:
        raise UsageError(f"{call}: nested tensors are not supported; pass their parts")
    if tensor.layout != torch.strided:
        raise UsageError(f"{call}: tensors of layout {tensor.layout} are not supported; pass a dense one")
    if tensor.device.type not in ("cpu", "cuda"):
        raise UsageError(
            f"{call}: the tensor is on {tensor.device}, but the collectives of this context are on cpu and cuda"
        )
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def _empty(like: torch.Tensor, shape: list[int]) -> torch.Tensor:
    return torch.empty(shape, dtype=like.dtype, device="cpu")


def _carried(
    call: str,
    source: torch.Tensor,
    shape: list[int],
    group: Any = None,
    op: str = "SUM",
    src: int = 0,
    in_place: bool = False,
) -> torch.Tensor:
    """The result of a collective, of that shape, on the source's device.

    in_place: source and result are one memory, which the rank that broadcasts sends.
    """

    def made(mine: torch.Tensor, result: torch.Tensor, place: tuple[int, int] | None = None) -> bool:
        return _native.dist_collective(
            call, mine.data_ptr(), dtype_name(mine.dtype), list(mine.shape), result.data_ptr(), op, src, group, place
        )

    devices = _devices.devices
    if not devices.has(source):
        result = source if in_place else _empty(source, shape)
        made(source, result)
        return result
    with devices.computing(source):
        result = source if in_place else devices.empty(shape, source)
        if made(source, result, devices.place_of(source)):
            return result
        mine = devices.to_host(source)
        result = mine if in_place else _empty(mine, shape)
        made(mine, result)
        sent = call == "broadcast" and in_place
        return source if sent else devices.from_host(result, source)


def _exchange_blocks(tensor: torch.Tensor, group: Any) -> torch.Tensor:
    source = _dense(tensor, "all_to_all")
    return _carried("all_to_all", source, list(source.shape), group)


class EngineContext:
    backend = staticmethod(_native.dist_backend)
    rank = staticmethod(_native.dist_rank)
    world_size = staticmethod(_native.dist_world_size)
    local_rank = staticmethod(_native.dist_local_rank)
    nproc_per_node = staticmethod(_native.dist_nproc_per_node)
    nnodes = staticmethod(_native.dist_nnodes)
    node_rank = staticmethod(_native.dist_node_rank)
    barrier = staticmethod(_native.dist_barrier)
    finalize = staticmethod(_native.dist_finalize)

    def device(self) -> torch.device:
        return torch.device(_native.dist_device())

    def new_group(self, ranks: list[int], backend: str | None, pg_options: Any) -> Any:
        if pg_options is not None:
            raise ConfigError("new_group: pg_options need torch.distributed, which is not initialized", "pg_options")
        return _native.dist_new_group(ranks, backend)

    def group_of(self, group: Any) -> Any:
        if group is None or isinstance(group, _native.Group):
            return group
        if isinstance(group, (list, tuple)):
            return list(group)
        if (ranks := _torch.ranks_of(group)) is not None:
            return ranks
        raise UsageError(
            f"a group must be a list of ranks or what new_group() returned; this is a {type(group).__name__}"
        )

    def contains(self, group: Any) -> bool:
        if group is None:
            return True
        rank = self.rank()
        return bool(group.contains(rank) if isinstance(group, _native.Group) else rank in group)

    # Collectives. Without other ranks they return their input.

    def all_reduce(self, tensor: torch.Tensor, op: str, group: Any) -> torch.Tensor:
        if not _native.dist_members(group):
            return tensor
        source = _dense(tensor, "all_reduce")
        is_copy = source.numel() > 0 and source.data_ptr() != tensor.data_ptr()
        return _carried("all_reduce", source, list(source.shape), group, op, in_place=is_copy)

    def all_gather(self, tensor: torch.Tensor, group: Any) -> torch.Tensor:
        members = _native.dist_members(group)
        if not members:
            return tensor
        source = _dense(tensor, "all_gather")
        first, *rest = source.shape or (1,)
        return _carried("all_gather", source, [first * members, *rest], group)

    def all_gather_objects(self, value: Any, group: Any) -> list[Any]:
        if isinstance(value, str):
            return list(_native.dist_all_gather_text(value, group))
        return [pickle.loads(data) for data in _native.dist_all_gather_bytes(cloudpickle.dumps(value), group)]

    def broadcast(self, tensor: torch.Tensor, src: int) -> torch.Tensor:
        if not _native.dist_members(None):
            return tensor
        source = _dense(tensor, "broadcast")
        return _carried("broadcast", source, list(source.shape), src=src, in_place=self.rank() == src)

    def check_sendable(self, tensor: torch.Tensor) -> None:
        """Raises UsageError if broadcast() cannot send the tensor."""
        if tensor.layout != torch.strided:
            raise UsageError(f"a tensor of layout {tensor.layout}; only dense ones can be sent")
        _dense(tensor, "a tensor that cannot be sent")
        _native.dist_check_dtype(dtype_name(tensor.dtype))

    def broadcast_object(self, value: Any, src: int) -> Any:
        data = cloudpickle.dumps(value) if self.rank() == src else b""
        return pickle.loads(_native.dist_broadcast_bytes(data, src))

    def reduce_scatter(self, tensor: torch.Tensor, op: str, group: Any) -> torch.Tensor:
        members = _native.dist_members(group)
        if not members:
            return tensor
        source = _dense(tensor, "reduce_scatter")
        shape = list(source.shape)
        shape[:1] = [size // members for size in shape[:1]]  # If it is no multiple, the call fails on all members.
        return _carried("reduce_scatter", source, shape, group, op)

    def all_to_all(self, tensor: torch.Tensor, group: Any) -> torch.Tensor:
        return _torch.exchange(_exchange_blocks, tensor, group) if _native.dist_members(group) else tensor
