"""The ranks of a torch.distributed process group that the user has made: the same calls as those of the engine."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

from accelmgr.errors import ConfigError, UsageError

_local_rank: int | None = None
_groups: dict[tuple[int, tuple[int, ...]], Any] = {}


def is_present() -> bool:
    return dist.is_available() and dist.is_initialized()


def set_local_rank(index: int | None) -> None:
    global _local_rank
    _local_rank = index


def _number(name: str) -> int | None:
    text = os.environ.get(name, "")
    return int(text) if text.isdigit() else None


def _on_one_host() -> bool:
    address = os.environ.get("MASTER_ADDR", "")
    return dist.get_world_size() == 1 or address in ("localhost", "::1") or address.startswith("127.")


_UNKNOWN = (
    "which ranks share a host is not known of a process group that was made by hand: call set_local_rank() first, or "
    "set LOCAL_RANK and LOCAL_WORLD_SIZE"
)


class TorchContext:
    """Collectives of torch.distributed; its errors are torch's own."""

    name = "native-dist"

    def backend(self) -> str:
        return str(dist.get_backend())

    def rank(self) -> int:
        return int(dist.get_rank())

    def world_size(self) -> int:
        return int(dist.get_world_size())

    def local_rank(self) -> int:
        for known in (_local_rank, _number("LOCAL_RANK"), self.rank() if _on_one_host() else None):
            if known is not None:
                return known
        raise UsageError(_UNKNOWN)

    def nproc_per_node(self) -> int:
        known = _number("LOCAL_WORLD_SIZE") or (self.world_size() if _on_one_host() else None)
        if known is None:
            raise UsageError(_UNKNOWN)
        return known

    def nnodes(self) -> int:
        return -(-self.world_size() // self.nproc_per_node())

    def node_rank(self) -> int:
        return self.rank() // self.nproc_per_node()

    def device(self) -> torch.device:
        return torch.device("cuda", self.local_rank()) if "nccl" in self.backend() else torch.device("cpu")

    def finalize(self) -> None:
        _groups.clear()
        dist.destroy_process_group()

    # Groups

    def new_group(self, ranks: list[int], backend: str | None, pg_options: Any) -> Any:
        self._check(ranks)
        return dist.new_group(sorted(ranks), backend=backend, pg_options=pg_options)

    def _check(self, ranks: list[int]) -> None:
        size = self.world_size()
        if not ranks:
            raise ConfigError("a group has one rank at least; none was given")
        if len(set(ranks)) != len(ranks):
            raise ConfigError(f"a group has each rank once, not {ranks}")
        for rank in ranks:
            if not 0 <= rank < size:
                raise ConfigError(f"a group of rank {rank}, in a world of {size}: ranks are 0 to {size - 1}")

    def group_of(self, group: Any) -> Any:
        """A list of ranks becomes a process group, which all ranks of the world make together; each once."""
        if group is None:
            return dist.group.WORLD
        if isinstance(group, (list, tuple)):
            self._check(list(group))
            key = (id(dist.group.WORLD), tuple(sorted(group)))
            if key not in _groups:
                _groups[key] = dist.new_group(list(key[1]))
            return _groups[key]
        if group is dist.GroupMember.NON_GROUP_MEMBER or isinstance(group, dist.ProcessGroup):
            return group
        raise UsageError(
            f"a group is a list of ranks or, of torch.distributed, a ProcessGroup; this is a {type(group).__name__}"
        )

    def contains(self, group: Any) -> bool:
        return group is not dist.GroupMember.NON_GROUP_MEMBER and dist.get_rank(group) >= 0

    # Collectives: groups are those of group_of(), this rank is in them.

    def barrier(self) -> None:
        dist.barrier()

    def all_reduce(self, tensor: torch.Tensor, op: str, group: Any) -> torch.Tensor:
        if op in ("AND", "OR"):
            if tensor.dtype != torch.bool:
                raise UsageError(f"all_reduce: {op} is of bool tensors, not of {tensor.dtype}")
            reduced = self.all_reduce(tensor.to(torch.uint8), "MIN" if op == "AND" else "MAX", group)
            return reduced.to(torch.bool)
        result = tensor.detach().clone(memory_format=torch.contiguous_format)
        if op == "AVG" and "nccl" not in self.backend():
            if not tensor.is_floating_point():
                raise UsageError(f"all_reduce: AVG is of floating point tensors, not of {tensor.dtype}")
            dist.all_reduce(result, op=dist.ReduceOp.SUM, group=group)
            return result.div_(dist.get_world_size(group))
        dist.all_reduce(result, op=getattr(dist.ReduceOp, op), group=group)
        return result

    def all_gather(self, tensor: torch.Tensor, group: Any) -> torch.Tensor:
        own = tensor.detach().contiguous()
        own = own.unsqueeze(0) if own.dim() == 0 else own
        # torch does not compare shapes, and waits for ever or reads beyond the end when they differ.
        shapes = self.all_gather_objects((str(own.dtype), tuple(own.shape)), group)
        if len(set(shapes)) > 1:
            each = ", ".join(f"{dtype} {list(shape)} in place {place}" for place, (dtype, shape) in enumerate(shapes))
            raise UsageError(f"all_gather: tensors must be alike, but there are {each}")
        gathered = [torch.empty_like(own) for _ in shapes]
        dist.all_gather(gathered, own, group=group)
        return torch.cat(gathered)

    def all_gather_objects(self, value: Any, group: Any) -> list[Any]:
        gathered: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(gathered, value, group=group)
        return gathered

    def broadcast(self, tensor: torch.Tensor, src: int) -> torch.Tensor:
        result = tensor.detach().contiguous()
        if self.rank() != src:
            result = torch.empty_like(result)
        dist.broadcast(result, src=src)
        return result

    def broadcast_object(self, value: Any, src: int) -> Any:
        box = [value]
        dist.broadcast_object_list(box, src=src)
        return box[0]

    def reduce_scatter(self, tensor: torch.Tensor, op: str, group: Any) -> torch.Tensor:
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        if tensor.dim() == 0 or tensor.shape[0] % size:
            raise UsageError(f"reduce_scatter: dimension 0 of {list(tensor.shape)} is no multiple of the {size} ranks")
        return self.all_reduce(tensor, op, group).chunk(size)[rank].clone()

    def all_to_all(self, tensor: torch.Tensor, group: Any) -> torch.Tensor:
        return _exchange(group, tensor)


class _AllToAll(torch.autograd.Function):
    """Its own transpose: gradients take the same way back."""

    @staticmethod
    def forward(ctx: Any, group: Any, tensor: torch.Tensor) -> torch.Tensor:
        ctx.group = group
        size = dist.get_world_size(group)
        if tensor.dim() == 0 or tensor.shape[0] % size:
            raise UsageError(f"all_to_all: dimension 0 of {list(tensor.shape)} is no multiple of the {size} ranks")
        tensor = tensor.contiguous()
        output = torch.empty_like(tensor)
        dist.all_to_all_single(output, tensor, group=group)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, _exchange(ctx.group, *gradients)


def _exchange(group: Any, tensor: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = _AllToAll.apply(group, tensor)  # type: ignore[no-untyped-call]
    return result
