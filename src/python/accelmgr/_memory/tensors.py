# Runs in: the host and runners.
"""Makes tensors over memory that the extension module describes by address, dtype and shape."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils import deterministic

Described = tuple[str, str, Sequence[int], Any]
"""A tensor's name, dtype ("float32") and shape, and its bytes: something with a buffer, row-major without gaps."""
Addressed = tuple[str, str, Sequence[int], int]
"""A tensor's name, dtype and shape, and the address of its first byte."""


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype in the extension module: "float32"."""
    return str(dtype).removeprefix("torch.")


def tensor_over(memory: Any, dtype: str, shape: Sequence[int], strides: Sequence[int]) -> torch.Tensor:
    """A tensor over all of `memory`, which it keeps alive. It is not a view of another tensor."""
    if 0 in shape:
        return torch.empty(tuple(shape), dtype=getattr(torch, dtype))
    return torch.frombuffer(memory, dtype=getattr(torch, dtype)).as_strided(shape, strides).data


def write(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Writes without autograd. torch.no_grad() would leave gradients disabled if a signal handler raised inside it."""
    tensor.detach().copy_(values.detach())


def storage_of(tensor: torch.Tensor) -> int:
    """A number for the memory of a tensor: tensors that share memory have the same."""
    number: int = tensor.untyped_storage()._cdata
    return number


def users_of(tensor: torch.Tensor) -> int:
    """How many tensors and other objects have its memory; 1: it alone."""
    one = torch.empty(1)
    counts = [torch._C._storage_Use_Count(each.untyped_storage()._cdata) for each in (tensor, one)]
    return 1 + counts[0] - counts[1]


def is_private(tensor: torch.Tensor) -> bool:
    """Whether torch has allocated its memory for this process. Other memory may be the same in all processes."""
    return tensor.untyped_storage().resizable() and not tensor.is_shared()  # type: ignore[no-untyped-call]


def is_compact(tensor: torch.Tensor) -> bool:
    """Whether it fills its memory without gaps and overlaps, in any order of its dimensions."""
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def is_expanded(tensor: torch.Tensor) -> bool:
    """Whether elements along some dimension are one in memory, as expand() makes them."""
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def stored(tensor: torch.Tensor, of: torch.Tensor | None = None) -> torch.Tensor:
    """The part of the tensor that can be written: one element along each dimension that `of` (None: itself) expands."""
    of = tensor if of is None else of
    for dimension in range(of.dim()):
        if of.stride(dimension) == 0 and of.size(dimension) > 1:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor


def order_of(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """The strides of a tensor that is compact; None: row-major. Autograd gives gradients the order of parameters."""
    return None if tensor.is_contiguous() or not is_compact(tensor) else tensor.stride()


def ordered(tensor: torch.Tensor, order: tuple[int, ...] | None) -> torch.Tensor:
    """The tensor in this order of order_of(), copied if it has another one."""
    if order is None:
        return tensor.contiguous()
    if tensor.stride() == order:
        return tensor
    return torch.empty_strided(tensor.shape, order, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def bytes_of(tensor: torch.Tensor) -> Any:
    """The elements in row-major order as a NumPy array of bytes, in the tensor's memory where that is possible."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8).numpy()


def write_bytes(tensor: torch.Tensor, content: Any) -> None:
    """Writes the result of bytes_of() into a tensor of the same dtype and shape."""
    write(tensor, torch.from_numpy(content).view(tensor.dtype).reshape(tensor.shape))


def dense_over(memory: Any, dtype: str, shape: Sequence[int]) -> torch.Tensor:
    """As tensor_over(), for a row-major tensor without gaps."""
    if 0 in shape:
        return torch.empty(tuple(shape), dtype=getattr(torch, dtype))
    return torch.frombuffer(memory, dtype=getattr(torch, dtype)).reshape(tuple(shape)).data


def named_tensors(values: Iterable[Described]) -> list[tuple[str, torch.Tensor]]:
    """Tensors over the memory of each value, with their names."""
    return [(name, dense_over(memory, dtype, shape)) for name, dtype, shape, memory in values]


def addressed(tensors: Iterable[tuple[str, torch.Tensor]]) -> list[Addressed]:
    """Addresses of dense tensors on the CPU.

    Requires: the tensors live while the addresses are used.
    """
    return [(name, dtype_name(value.dtype), tuple(value.shape), value.data_ptr()) for name, value in tensors]


@contextlib.contextmanager
def unfilled() -> Iterator[None]:
    """In the block, tensors that torch makes keep what their memory holds.

    Otherwise deterministic algorithms (`deterministic`) would first fill each with NaN: another pass over memory that
    is overwritten later.
    """
    before = deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        deterministic.fill_uninitialized_memory = before  # type: ignore[attr-defined]
