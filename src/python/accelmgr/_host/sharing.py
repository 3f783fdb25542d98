# Runs in: the host.
"""Sends tensors of a session through multiprocessing's pipes and queues as copies.

When torch sends a tensor, it moves the tensor's memory, in place, to where the other process can map it. A parameter
would leave the session, and the host's writes would no longer reach the runners. (hivemind sends its state like this
when a peer that joins asks for it.)
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch.multiprocessing import reductions

_storages: weakref.WeakKeyDictionary[Any, frozenset[int]] = weakref.WeakKeyDictionary()


def stay(owner: object, tensors: Iterable[torch.Tensor]) -> None:
    """While `owner` lives, tensors that share memory with these are sent as copies."""
    _storages[owner] = frozenset(tensor.untyped_storage().data_ptr() for tensor in tensors)
    for kind in (torch.Tensor, torch.nn.Parameter):
        ForkingPickler.register(kind, _reduce)


def _reduce(tensor: torch.Tensor) -> Any:
    if tensor.device.type == "cpu" and tensor.layout == torch.strided:
        address = tensor.untyped_storage().data_ptr()
        if any(address in storages for storages in list(_storages.values())):
            copy = tensor.detach().clone()
            if isinstance(tensor, torch.nn.Parameter):
                copy = torch.nn.Parameter(copy)
            tensor = copy.requires_grad_(tensor.requires_grad)
    return reductions.reduce_tensor(tensor)  # type: ignore[no-untyped-call]
