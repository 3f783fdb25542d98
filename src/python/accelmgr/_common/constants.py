# Runs in: the host, the manager and runners.
"""Large buffers that nobody changes: the base of a quantized or adapted model, tables, causal masks.

They lie in the session once, as frozen parameters do, and no step copies them. When forward() writes to one, or puts
another tensor in its place, the runner says so, and the host starts again with an ordinary buffer in its place; so it
does when it has itself put another tensor there.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch

from accelmgr._common.memory import is_compact, stored

CONSTANT_BYTES = 1 << 20
CHANGES = "", ()
"""Stands for the form of such a buffer in Forms: it changes."""

_changing: weakref.WeakKeyDictionary[torch.nn.Module, frozenset[str]] = weakref.WeakKeyDictionary()


def expect_constants(model: torch.nn.Module, grown: Iterable[str], seen: bool) -> None:
    """grown: buffers that change. seen: runners see writes to constants; otherwise there are none."""
    if seen:
        _changing[model] = frozenset(grown)
    else:
        _changing.pop(model, None)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether it has memory of its own that says all about it."""
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not (tensor.is_quantized or tensor.requires_grad or tensor.is_inference())
        and is_compact(stored(tensor))
        and tensor.untyped_storage().nbytes() == stored(tensor).nbytes
    )


class Constants:
    """Those of a model."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.non_persistent: set[str] = set()
        self._places: list[tuple[str, dict[str, Any], str, torch.Tensor]] = []
        changing = _changing.get(model)
        if changing is None:
            return
        modules = list(model.named_modules())
        times = Counter(id(tensor) for _, module in modules for tensor in module._buffers.values())
        for prefix, module in modules:
            for key, tensor in module._buffers.items():
                name = f"{prefix}.{key}" if prefix else key
                if tensor is None or tensor.nbytes < CONSTANT_BYTES or not _is_plain(tensor) or name in changing:
                    continue
                if times[id(tensor)] == 1:
                    self._places.append((name, module._buffers, key, tensor))
                    if key in module._non_persistent_buffers_set:
                        self.non_persistent.add(name)
        self.note()

    @property
    def named(self) -> list[tuple[str, torch.Tensor]]:
        return [(name, tensor) for name, _, _, tensor in self._places]

    def note(self) -> None:
        """Their memory is where it is to stay."""
        self._addresses = [tensor.data_ptr() for _, _, _, tensor in self._places]

    def replaced(self) -> list[str]:
        """Those that are another tensor, or have other memory, since note()."""
        return [
            name
            for (name, owner, key, tensor), address in zip(self._places, self._addresses, strict=True)
            if owner.get(key) is not tensor or tensor.data_ptr() != address
        ]
