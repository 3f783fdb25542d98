# Runs in: the host, the manager and runners.
"""Where tensors lie in memory that processes share."""

from __future__ import annotations

import ctypes
import dataclasses
import mmap
from collections.abc import Sequence
from typing import Any

import torch

from accelmgr._memory.memfd import MAP_NORESERVE
from accelmgr._memory.tensors import is_compact, is_expanded, stored

ALIGNMENT = 64


def aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


@dataclasses.dataclass(frozen=True)
class Slot:
    """The place of a tensor in memory."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    requires_grad: bool
    kind: type[torch.Tensor] | None  # The class of a parameter; None: a buffer.

    @property
    def extent(self) -> int:
        """Number of elements from the first to the last one, gaps included."""
        if 0 in self.shape:
            return 0
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))

    def view(self, memory: Any) -> torch.Tensor:
        if self.extent == 0:
            return torch.empty(self.shape, dtype=self.dtype)
        flat = torch.frombuffer(memory, dtype=self.dtype, count=self.extent, offset=self.offset)
        return flat.as_strided(self.shape, self.strides)


def tensor_in(memory: Any, offset: int, like: Any) -> torch.Tensor:
    """A dense tensor in the memory. like: has its dtype, shape and nbytes."""
    if like.nbytes == 0:
        return torch.empty(like.shape, dtype=like.dtype)
    content = torch.frombuffer(memory, dtype=torch.uint8, count=like.nbytes, offset=offset)
    return content.view(like.dtype).view(like.shape)


def extent_of(tensor: torch.Tensor) -> tuple[int, int]:
    """The address of the first byte, and the one behind the last byte."""
    begin = tensor.data_ptr()
    if tensor.numel() == 0:
        return begin, begin
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (last + 1) * tensor.element_size()


def overlapping(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """The indexes of the tensors, in groups that share memory. Most groups have one tensor."""
    groups: list[list[int]] = []
    reached = 0
    for (begin, end), index in sorted((extent_of(tensor), index) for index, tensor in enumerate(tensors)):
        if begin == end:
            groups.insert(0, [index])
        elif begin < reached:
            groups[-1].append(index)
        else:
            groups.append([index])
        reached = max(reached, end)
    return groups


def slots_of(tensors: Sequence[tuple[str, torch.Tensor]]) -> tuple[list[Slot], int]:
    """The slot of each tensor, and the bytes of all slots.

    Tensors are laid out without gaps, in the order that they have in memory; those that require no gradient may be
    expanded. Tensors that share memory keep their strides and go on sharing it.
    """
    slots: dict[int, Slot] = {}
    end = 0
    values = [tensor for _, tensor in tensors]
    for group in overlapping(values):
        first = min(values[index].data_ptr() for index in group)
        last = max(extent_of(values[index])[1] for index in group)
        for index in group:
            name, tensor = tensors[index]
            alone = len(group) == 1
            kind = type(tensor) if isinstance(tensor, torch.nn.Parameter) else None
            strides = tensor.stride()
            if alone and not is_compact(tensor if tensor.requires_grad else stored(tensor)):
                strides = torch.empty(tensor.shape, device="meta").stride()
            offset = end if alone else end + tensor.data_ptr() - first
            slots[index] = Slot(
                name, tensor.dtype, tuple(tensor.shape), tuple(strides), offset, tensor.requires_grad, kind
            )
        slot = slots[group[0]]
        size = slot.extent * slot.dtype.itemsize if len(group) == 1 else last - first
        end += aligned(size)
    return [slots[index] for index in range(len(tensors))], end


def copy_values(tensors: Sequence[torch.Tensor], slots: Sequence[Slot], memory: Any) -> list[torch.Tensor]:
    """Copies the tensors into `memory`. Returns views of it, one for each slot."""
    views = [slot.view(memory) for slot in slots]
    for group in overlapping(tensors):
        if len(group) == 1:
            view = views[group[0]]
            stored(view).copy_(stored(tensors[group[0]], view))
            continue
        begin = min(tensors[index].data_ptr() for index in group)
        size = max(extent_of(tensors[index])[1] for index in group) - begin
        ctypes.memmove(min(views[index].data_ptr() for index in group), begin, size)
    return views


def drop_values(tensors: Sequence[torch.Tensor]) -> None:
    """Takes their memory away. They keep their shapes, over pages that are never touched, until they get another."""
    slots, size = slots_of([("", tensor) for tensor in tensors])
    memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    for tensor, slot in zip(tensors, slots, strict=True):
        tensor.data = slot.view(memory)


def private_copies(tensors: Sequence[torch.Tensor], expanded: bool = False) -> list[torch.Tensor]:
    """Copies in the private memory of this process. Tensors that shared memory share it in the copy, too.

    The others may be resized, as any tensor of torch. expanded: those that are expanded stay so.
    """
    copies = [tensor.detach() for tensor in tensors]
    for group in overlapping(tensors):
        if len(group) == 1:
            own = tensors[group[0]].detach()
            copies[group[0]] = stored(own).clone().expand(own.shape) if expanded and is_expanded(own) else own.clone()
            continue
        members = [tensors[index] for index in group]
        slots, size = slots_of([("", tensor) for tensor in members])
        for index, copy in zip(group, copy_values(members, slots, bytearray(size)), strict=True):
            copies[index] = copy
    return copies
