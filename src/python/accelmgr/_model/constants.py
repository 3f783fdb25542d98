# Runs in: the host, the manager and runners.
"""Large buffers that nobody changes: the base of a quantized or adapted model, tables, causal masks.

They lie in the session once, as frozen parameters do, and no step copies them. When forward() writes to one, or puts
another tensor in its place, the runner says so, and the host starts again with an ordinary buffer in its place. The
host does so, too, when it has put another tensor there itself.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch

from accelmgr._memory.tensors import is_compact, stored

CONSTANT_BYTES = 1 << 20
CHANGES = "", ()
"""In Forms: the buffer changes, so it is no constant."""

_changing: weakref.WeakKeyDictionary[torch.nn.Module, frozenset[str]] = weakref.WeakKeyDictionary()


def expect_constants(model: torch.nn.Module, grown: Iterable[str], seen: bool) -> None:
    """grown: buffers that change. seen: runners see writes to constants; otherwise there are none."""
    if seen:
        _changing[model] = frozenset(grown)
    else:
        _changing.pop(model, None)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether it is a plain dense tensor on the CPU with memory of its own."""
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not (tensor.is_quantized or tensor.requires_grad or tensor.is_inference())
        and is_compact(stored(tensor))
        and tensor.untyped_storage().nbytes() == stored(tensor).nbytes
    )


class Constants:
    """The constants of a model."""

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
        """Notes where the constants lie. From now on they must stay there."""
        self._addresses = [tensor.data_ptr() for _, _, _, tensor in self._places]

    def replaced(self) -> list[str]:
        """The names of constants that have become another tensor, or have other memory, since note()."""
        return [
            name
            for (name, owner, key, tensor), address in zip(self._places, self._addresses, strict=True)
            if owner.get(key) is not tensor or tensor.data_ptr() != address
        ]
