# Runs in: the host, the manager and runners.
"""Pickles a model without its tensors: a number stands for each.

_host/model_sending.py makes the bytes that runners get with it, and _runner/received.py reads them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.utils import parametrize

from accelmgr._serialization.pickling import KnownPickler, is_picklable

HOOKS_OF_TENSORS = ("_backward_hooks", "_post_accumulate_grad_hooks")


@dataclasses.dataclass(frozen=True)
class Attached:
    """Attributes and hooks of a tensor of the model. A runner attaches them to its own tensor of the same number."""

    number: int
    attributes: dict[str, Any]
    hooks: dict[str, list[Callable[..., Any]]]
    """The hooks of the tensor, by kind."""

    @staticmethod
    def of(number: int, tensor: torch.Tensor) -> Attached:
        hooks = {kind: list((getattr(tensor, kind, None) or {}).values()) for kind in HOOKS_OF_TENSORS}
        return Attached(number, dict(tensor.__dict__), hooks)

    def __bool__(self) -> bool:
        return bool(self.attributes) or any(self.hooks.values())

    def attach(self, tensor: torch.Tensor) -> None:
        tensor.__dict__.update(self.attributes)
        for hook in self.hooks["_backward_hooks"]:
            tensor.register_hook(hook)  # type: ignore[no-untyped-call]
        for hook in self.hooks["_post_accumulate_grad_hooks"]:
            tensor.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]


def _parametrized(kind: type[torch.nn.Module], names: list[str]) -> torch.nn.Module:
    """An empty module of the class that torch.nn.utils.parametrize makes of `kind`."""
    module = kind.__new__(kind)
    parametrize._inject_new_class(module)
    for name in names:
        parametrize._inject_property(module, name)
    return module


class ModelPickler(KnownPickler):
    """Leaves the model's tensors out. The reader makes the class of a parametrized module again."""

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, torch.nn.Module) or not parametrize.is_parametrized(obj):
            return super().reducer_override(obj)
        kind = parametrize.type_before_parametrizations(obj)
        state_of = getattr(kind, "__getstate__", vars)  # object has it since Python 3.11.
        return _parametrized, (kind, list(obj.parametrizations)), state_of(obj)  # type: ignore[arg-type]


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
        if not is_picklable(attribute):
            return culprit(attribute, f"{path}.{name}" if name else path, depth - 1)
    return f"{path} ({type(value).__module__}.{type(value).__qualname__})"
