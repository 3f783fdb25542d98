# Runs in: the host, the manager and runners.
"""Pickles a model without its tensors: a number stands for each."""

from __future__ import annotations

import dataclasses
import mmap
import pickle
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

import cloudpickle
import torch
from torch.nn.utils import parametrize

from accelmgr._common.model_outline import HOOKS_OF_TENSORS, HooksOfTensors, registrar_of


@dataclasses.dataclass(frozen=True)
class Attached:
    """Attributes and hooks of a tensor of the model. A runner attaches them to its own tensor of the same number."""

    number: int
    attributes: dict[str, Any]
    hooks: dict[str, dict[int, Callable[..., Any]]]
    """By their kind, and by their numbers in the host."""

    @staticmethod
    def of(number: int, tensor: torch.Tensor) -> Attached:
        hooks = {kind: dict(getattr(tensor, kind, None) or {}) for kind in HOOKS_OF_TENSORS}
        return Attached(number, dict(tensor.__dict__), hooks)

    def __bool__(self) -> bool:
        return bool(self.attributes) or any(self.hooks.values())

    def attach(self, tensor: torch.Tensor) -> HooksOfTensors:
        tensor.__dict__.update(self.attributes)
        return {
            (self.number, kind, number): registrar_of(tensor, kind)(hook)
            for kind, hooks in self.hooks.items()
            for number, hook in hooks.items()
        }


def _parametrized(kind: type[torch.nn.Module], names: list[str]) -> torch.nn.Module:
    """An empty module of the class that torch.nn.utils.parametrize makes of `kind`."""
    module = kind.__new__(kind)
    parametrize._inject_new_class(module)
    for name in names:
        parametrize._inject_property(module, name)
    return module


class ModelPickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """Leaves the model's tensors out. A parametrized module, whose class is made anew for it, is made again there."""

    def __init__(self, file: BinaryIO, numbers: Mapping[int, int]) -> None:
        super().__init__(file)
        self._numbers = numbers

    def persistent_id(self, obj: Any) -> int | None:
        return self._numbers.get(id(obj)) if isinstance(obj, torch.Tensor) else None

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, torch.nn.Module) or not parametrize.is_parametrized(obj):
            return super().reducer_override(obj)
        kind = parametrize.type_before_parametrizations(obj)
        state_of = getattr(kind, "__getstate__", vars)  # object has it since Python 3.11.
        return _parametrized, (kind, list(obj.parametrizations)), state_of(obj)  # type: ignore[arg-type]


class ModelUnpickler(pickle.Unpickler):
    def __init__(self, file: BinaryIO | mmap.mmap, tensors: list[torch.Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, pid: int) -> torch.Tensor:
        return self._tensors[pid]


def culprit(value: Any, path: str, depth: int = 4) -> str:
    """Path and type of the innermost attribute of `value` that cannot be pickled."""
    attributes: dict[Any, Any] = {}
    if isinstance(value, torch.nn.Module):
        attributes = {**value.__dict__.get("_modules", {})}
        attributes |= {k: v for k, v in value.__dict__.items() if not k.startswith("_")}
    elif isinstance(value, dict):
        attributes = value
    elif hasattr(value, "__dict__"):
        attributes = vars(value)
    for name, attribute in attributes.items() if depth > 0 else ():
        try:
            cloudpickle.dumps(attribute)
        except Exception:
            return culprit(attribute, f"{path}.{name}", depth - 1)
    return f"{path} ({type(value).__module__}.{type(value).__qualname__})"
