# Runs in: the host and the manager.
"""Generators of random numbers that a dataset has of its own, in its attributes or in parts of it: `self.rng`.

Their states are part of the position in the data. One whose first state is not that of the generator in the position's
process was seeded by the script since then, and stays as it is.
"""

from __future__ import annotations

import json
import random
import sys
import zlib
from collections import deque
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any

import torch

from accelmgr._serialization.checkpoint_values import as_text, from_text

_MOST_OBJECTS, _MOST_ENTRIES = 1000, 100
_LEAVES = (type, ModuleType, FunctionType, torch.nn.Module, torch.Tensor, torch.utils.data.DataLoader)


def _parts_of(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple, dict)):
        if len(value) <= _MOST_ENTRIES:
            yield from value.values() if isinstance(value, dict) else value
    elif not isinstance(value, _LEAVES):
        yield from getattr(value, "__dict__", {}).values()


def _plain(value: Any) -> Any:
    """The state of a generator of NumPy as JSON can say it."""
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    return value.tolist() if hasattr(value, "tolist") else value


class OwnGenerator:
    def __init__(self, generator: Any) -> None:
        self._generator = generator
        self._first = self._state()

    def _state(self) -> str:
        state: Any
        if isinstance(self._generator, torch.Generator):
            state = as_text(self._generator.get_state())
        elif isinstance(self._generator, random.Random):
            state = self._generator.getstate()
        elif hasattr(self._generator, "bit_generator"):
            state = _plain(self._generator.bit_generator.state)
        else:
            state = _plain(self._generator.get_state(legacy=False))
        return json.dumps(state)

    def _set(self, state: Any) -> None:
        if isinstance(self._generator, torch.Generator):
            self._generator.set_state(from_text(state))
        elif isinstance(self._generator, random.Random):
            version, numbers, gauss = state
            self._generator.setstate((version, tuple(numbers), gauss))
        elif hasattr(self._generator, "bit_generator"):
            self._generator.bit_generator.state = state
        else:
            self._generator.set_state(state)

    def position(self) -> tuple[int, str]:
        """A checksum of its first state, and its present state."""
        return self._sum(), self._state()

    def _sum(self) -> int:
        return zlib.crc32(self._first.encode())

    def restore(self, position: tuple[int, str] | None) -> None:
        """Goes on at a position() of another process; None: at the beginning. A first look may have drawn meanwhile."""
        first, state = position or (0, "")
        self._set(json.loads(state if position and first == self._sum() else self._first))


def find(dataset: Any, known: list[torch.Generator]) -> list[OwnGenerator]:
    """Those that are not known, in an order that is the same in each process that has the dataset."""
    numpy = sys.modules.get("numpy.random")
    kinds = (torch.Generator, random.Random, *((numpy.Generator, numpy.RandomState) if numpy is not None else ()))
    found: list[OwnGenerator] = []
    waiting, seen = deque([dataset]), set(map(id, known))
    while waiting and len(seen) < _MOST_OBJECTS:
        value = waiting.popleft()
        if isinstance(value, (str, bytes, int, float)) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, kinds):
            if not isinstance(value, torch.Generator) or value.device.type == "cpu":
                found.append(OwnGenerator(value))
        else:
            waiting.extend(_parts_of(value))
    return found
