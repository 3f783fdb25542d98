# Runs in: the host and runners.
"""Tensors of the script in the memory of parameters, as state_dict(), detach() and views return them.

When parameters move into the session, to other memory of a runner, or out of the session, these tensors follow, as if
nothing had moved.
"""

from __future__ import annotations

import gc
import itertools
import logging
import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from accelmgr._memory.tensors import storage_of, users_of

logger = logging.getLogger("accelmgr")


class _Alias(NamedTuple):
    tensor: torch.Tensor
    leaf: torch.Tensor
    form: tuple[torch.dtype, tuple[int, ...]]
    """Dtype and strides of the leaf. It may have others where it moves."""
    offset: int
    """In bytes, from the leaf's first element."""


_found: weakref.WeakKeyDictionary[torch.nn.Module, list[_Alias]] = weakref.WeakKeyDictionary()
"""By model. Forks inherit it."""


def find(model: torch.nn.Module, leaves: Sequence[torch.Tensor], known: Iterable[torch.Tensor] = ()) -> None:
    """Finds the aliases of `leaves`, for follow(). known: tensors in their memory that do not follow.

    Looks through all objects of the process if more tensors use a leaf's memory than are known: 0.1 s with a million
    objects. Warns of a tensor that cannot follow.
    """
    on_cpu = {id(leaf): leaf for leaf in leaves if _is_dense(leaf)}
    others = {id(tensor): tensor for tensor in known} | on_cpu
    users = Counter(map(storage_of, others.values()))
    shared: dict[int, list[torch.Tensor]] = {}
    for leaf in on_cpu.values():
        if users_of(leaf) > users[storage_of(leaf)]:
            shared.setdefault(storage_of(leaf), []).append(leaf)
    found = _found.setdefault(model, [])
    before = {id(alias.tensor) for alias in found}  # Of a call that a signal handler has cut short.
    if not shared:
        return
    with torch._C.DisableTorchFunctionSubclass():
        for each in gc.get_objects():
            if issubclass(type(each), torch.Tensor) and id(each) not in others and id(each) not in before:
                try:
                    sharing = shared.get(storage_of(each), []) if each.numel() > 0 else []
                except (RuntimeError, NotImplementedError, ValueError):  # It has no memory.
                    continue
                if sharing:
                    found.extend(_alias_of(each, sharing))


def _is_dense(leaf: torch.Tensor) -> bool:
    is_made = not torch.nn.parameter.is_lazy(leaf)  # Others are refused later.
    return is_made and leaf.device.type == "cpu" and leaf.layout == torch.strided and leaf.numel() > 0


def _alias_of(tensor: torch.Tensor, leaves: list[torch.Tensor]) -> list[_Alias]:
    begin, end = _extent(tensor)
    for leaf in leaves:
        first, last = _extent(leaf)
        if first <= begin and end <= last and not tensor.is_conj() and not tensor.is_neg():
            return [_Alias(tensor, leaf, _form(leaf), begin - first)]
    logger.warning(
        "a tensor of this process, %s, shares memory with a parameter, %s, and is not a part of it: it keeps its "
        "values from now on. Take it from the model again after the start",
        list(tensor.shape),
        list(leaves[0].shape),
    )
    return []


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The bytes of its storage in which a tensor lies."""
    last = sum(stride * (size - 1) for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    first = int(tensor.storage_offset())
    return first * tensor.itemsize, (first + last + 1) * tensor.itemsize


def _form(leaf: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...]]:
    return leaf.dtype, leaf.stride()


def follow(model: torch.nn.Module | None) -> None:
    """Moves the aliases that find() has found to where the leaves are now."""
    if model is None or not (found := _found.get(model)):
        return
    moving = [alias for alias in found if alias.leaf.device.type == "cpu" and _form(alias.leaf) == alias.form]
    places = [
        torch.empty(0, dtype=tensor.dtype).set_(
            leaf.untyped_storage(),
            (leaf.storage_offset() * leaf.itemsize + offset) // tensor.itemsize,
            tensor.shape,
            tensor.stride(),
        )
        for tensor, leaf, _, offset in moving
    ]
    for alias in moving:
        _keep_exported(alias.tensor)
    # No signal handler raises in map().
    list(map(setattr, (alias.tensor for alias in moving), itertools.repeat("data"), places))


def _keep_exported(tensor: torch.Tensor) -> None:
    """Call it before the tensor gets other memory: a NumPy array may lie in the present one, and hold only a tensor.

    Then that memory stays as long as the tensor, and the array keeps its values.
    """
    storage = tensor.untyped_storage()
    if not storage.resizable():
        weakref.finalize(tensor, storage.size).atexit = False


def forget(model: torch.nn.Module | None) -> None:
    """The aliases need not follow any more."""
    if model is not None:
        _found.pop(model, None)
