"""The context over a torch.distributed process group that the user has made. It has the calls of the engine's."""

from __future__ import annotations

import functools
import hashlib
import os
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from accelmgr.errors import CollectiveError, ConfigError, UsageError

_local_rank: int | None = None


class _Groups:
    """The groups that were made of lists of ranks, in the world that is there now: they end with their world."""

    def __init__(self) -> None:
        self._world: Any = None  # A weak reference. A later world may have the same id().
        self._made: dict[tuple[int, ...], Any] = {}

    def of(self, ranks: tuple[int, ...]) -> Any:
        world = dist.group.WORLD
        if self._world is None or self._world() is not world:
            self.clear()
            self._world = weakref.ref(world)
        if ranks not in self._made:
            self._made[ranks] = dist.new_group(list(ranks))
        return self._made[ranks]

    def clear(self) -> None:
        self._world = None
        self._made.clear()


_groups = _Groups()


def is_present() -> bool:
    return dist.is_available() and dist.is_initialized()


def set_local_rank(index: int | None) -> None:
    global _local_rank
    _local_rank = index


def _number(name: str) -> int | None:
    text = os.environ.get(name, "")
    return int(text) if text.isdigit() else None


def _on_one_node() -> bool:
    address = os.environ.get("MASTER_ADDR", "")
    return dist.get_world_size() == 1 or address in ("localhost", "::1") or address.startswith("127.")


def ranks_of(group: Any) -> list[int] | None:
    """The world's ranks in a group that torch's new_group() has returned; [] outside it. None: it is no group."""
    if not is_present():
        return None
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        return []
    return dist.get_process_group_ranks(group) if isinstance(group, dist.ProcessGroup) else None


_UNKNOWN = (
    "it is not known which ranks of this process group share a node, as no launcher set the environment: call "
    "set_local_rank() first, or set LOCAL_RANK and LOCAL_WORLD_SIZE"
)


class TorchContext:
    """Collectives of torch.distributed. Errors of torch pass through unchanged."""

    name = "native-dist"

    def backend(self) -> str:
        return str(dist.get_backend())

    def rank(self) -> int:
        return int(dist.get_rank())

    def world_size(self) -> int:
        return int(dist.get_world_size())

    def local_rank(self) -> int:
        for known in (_local_rank, _number("LOCAL_RANK"), self.rank() if _on_one_node() else None):
            if known is not None:
                return known
        raise UsageError(_UNKNOWN)

    def nproc_per_node(self) -> int:
        known = _number("LOCAL_WORLD_SIZE") or (self.world_size() if _on_one_node() else None)
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
        _groups.clear()  # Before their world.
        dist.destroy_process_group()

    # Groups

    def new_group(self, ranks: list[int], backend: str | None, pg_options: Any) -> Any:
        self._check(ranks)
        if not ranks:
            return dist.GroupMember.NON_GROUP_MEMBER
        return dist.new_group(sorted(ranks), backend=backend, pg_options=pg_options)

    def _check(self, ranks: list[int]) -> None:
        size = self.world_size()
        if not ranks and size > 1:
            raise ConfigError("a group needs at least one rank; none was given")
        if len(set(ranks)) != len(ranks):
            raise ConfigError(f"each rank may be in a group only once, not {ranks}")
        for rank in ranks:
            if not 0 <= rank < size:
                raise ConfigError(f"a group cannot have rank {rank}: in a world of {size}, ranks are 0 to {size - 1}")

    def group_of(self, group: Any) -> Any:
        """The process group of a list of ranks. All ranks of the world make it together, the first time it is used."""
        if group is None:
            return dist.group.WORLD
        if isinstance(group, (list, tuple)):
            self._check(list(group))
            if not group:
                return dist.GroupMember.NON_GROUP_MEMBER
            return _groups.of(tuple(sorted(group)))
        if group is dist.GroupMember.NON_GROUP_MEMBER or isinstance(group, dist.ProcessGroup):
            return group
        raise UsageError(
            f"a group must be a list of ranks or a ProcessGroup of torch.distributed; this is a {type(group).__name__}"
        )

    def contains(self, group: Any) -> bool:
        return group is not dist.GroupMember.NON_GROUP_MEMBER and dist.get_rank(group) >= 0

    # Collectives. A group is from group_of(), and this rank is in it. torch does not compare the calls of the ranks:
    # where they differ it waits for ever, or mixes their bytes. So all of these begin with the same small all-reduce.

    def _agree(self, call: str, group: Any = None) -> None:
        """Raises CollectiveError on all members unless they make the same call."""
        digest = int.from_bytes(hashlib.blake2b(call.encode(), digest_size=7).digest(), "big")
        extremes = torch.tensor([digest, -digest], dtype=torch.int64, device=self.device())
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group)
        highest, lowest = extremes.tolist()
        if highest == -lowest:
            return
        calls = self._gathered(call, group)
        ranks = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
        each = "; ".join(f"member {member} called {other}" for member, other in enumerate(calls))
        different = [rank for rank, other in zip(ranks, calls, strict=True) if other != calls[0]]
        raise CollectiveError(f"the members made different calls: {each}", "mismatch", different)

    def _gathered(self, value: Any, group: Any) -> list[Any]:
        gathered: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(gathered, value, group=group)
        return gathered

    def barrier(self) -> None:
        self._agree("barrier")
        dist.barrier()

    def all_reduce(self, tensor: torch.Tensor, op: str, group: Any) -> torch.Tensor:
        self._agree(f"all_reduce {op} {_described(tensor)}", group)
        return self._reduced(tensor, op, group, "all_reduce")

    def _reduced(self, tensor: torch.Tensor, op: str, group: Any, call: str) -> torch.Tensor:
        if op in ("AND", "OR"):
            return self._combined(tensor, op, group, call)
        result = tensor.detach().clone(memory_format=torch.contiguous_format)
        if op == "AVG" and "nccl" not in self.backend():
            if not tensor.is_floating_point():
                raise UsageError(f"{call}: AVG needs floating-point tensors, not {tensor.dtype}")
            dist.all_reduce(result, op=dist.ReduceOp.SUM, group=group)
            return result / dist.get_world_size(group)
        dist.all_reduce(result, op=getattr(dist.ReduceOp, op), group=group)
        return result

    def _combined(self, tensor: torch.Tensor, op: str, group: Any, call: str) -> torch.Tensor:
        """Combines bit by bit, here: no backend does so for all dtypes, and nccl for none, but each carries bytes."""
        if tensor.is_floating_point() or tensor.is_complex():
            raise UsageError(f"{call}: {op} needs integers or bools, not {tensor.dtype}")
        own = tensor.detach().contiguous()
        if own.numel() == 0:
            return own.clone()
        data = own.reshape(-1).view(torch.uint8)
        gathered = [torch.empty_like(data) for _ in range(dist.get_world_size(group))]
        dist.all_gather(gathered, data, group=group)
        combined = functools.reduce(torch.bitwise_and if op == "AND" else torch.bitwise_or, gathered)
        return combined.view(own.dtype).reshape(own.shape)

    def all_gather(self, tensor: torch.Tensor, group: Any) -> torch.Tensor:
        self._agree(f"all_gather {_described(tensor)}", group)
        own = tensor.detach().contiguous()
        own = own.unsqueeze(0) if own.dim() == 0 else own
        gathered = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
        dist.all_gather(gathered, own, group=group)
        return torch.cat(gathered)

    def all_gather_objects(self, value: Any, group: Any) -> list[Any]:
        self._agree("all_gather of objects", group)
        return self._gathered(value, group)

    def broadcast(self, tensor: torch.Tensor, src: int) -> torch.Tensor:
        self._agree(f"broadcast from rank {src} {_described(tensor)}")
        result = tensor.detach().contiguous()
        if self.rank() != src:
            result = torch.empty_like(result)
        dist.broadcast(result, src=src)
        return result

    def broadcast_object(self, value: Any, src: int) -> Any:
        self._agree(f"broadcast of an object from rank {src}")
        box = [value]
        dist.broadcast_object_list(box, src=src)
        return box[0]

    def reduce_scatter(self, tensor: torch.Tensor, op: str, group: Any) -> torch.Tensor:
        self._agree(f"reduce_scatter {op} {_described(tensor)}", group)
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        if tensor.dim() == 0 or tensor.shape[0] % size:
            raise UsageError(
                f"reduce_scatter: dimension 0 of {list(tensor.shape)} is not a multiple of the {size} ranks"
            )
        return self._reduced(tensor, op, group, "reduce_scatter").chunk(size)[rank].clone()

    def all_to_all(self, tensor: torch.Tensor, group: Any) -> torch.Tensor:
        return exchange(_exchange_blocks, tensor, group)

    def check_sendable(self, tensor: torch.Tensor) -> None:
        """Raises UsageError if broadcast() cannot send the tensor."""
        if tensor.is_quantized or tensor.is_nested or tensor.layout != torch.strided or tensor.is_meta:
            raise UsageError(f"a tensor of layout {tensor.layout} on {tensor.device}; only dense ones can be sent")


def _described(tensor: torch.Tensor) -> str:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"a {type(tensor).__name__} was passed to a collective of tensors")
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _exchange_blocks(tensor: torch.Tensor, group: Any) -> torch.Tensor:
    context._agree(f"all_to_all {_described(tensor)}", group)
    size = dist.get_world_size(group)
    if tensor.dim() == 0 or tensor.shape[0] % size:
        raise UsageError(f"all_to_all: dimension 0 of {list(tensor.shape)} is not a multiple of the {size} ranks")
    tensor = tensor.contiguous()
    output = torch.empty_like(tensor)
    dist.all_to_all_single(output, tensor, group=group)
    return output


Exchange = Callable[[torch.Tensor, Any], torch.Tensor]
"""Exchanges the blocks of a tensor among the ranks of a group."""


class _AllToAll(torch.autograd.Function):
    """Its backward pass is the same exchange: each gradient goes back to the rank of its block."""

    @staticmethod
    def forward(ctx: Any, blocks: Exchange, group: Any, tensor: torch.Tensor) -> torch.Tensor:
        ctx.blocks, ctx.group = blocks, group
        return blocks(tensor, group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, None, torch.Tensor]:
        return None, None, exchange(ctx.blocks, gradients[0], ctx.group)


def exchange(blocks: Exchange, tensor: torch.Tensor, group: Any) -> torch.Tensor:
    """What `blocks` gives, with a backward pass."""
    if not (isinstance(tensor, torch.Tensor) and tensor.requires_grad and torch.is_grad_enabled()):
        return blocks(tensor, group)
    result: torch.Tensor = _AllToAll.apply(blocks, group, tensor)  # type: ignore[no-untyped-call]
    return result


context = TorchContext()
