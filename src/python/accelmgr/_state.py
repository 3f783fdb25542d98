"""State dicts of optimizers and schedulers as JSON and tensors, which is what a checkpoint holds of the host's."""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from accelmgr.errors import CheckpointError

LARGEST = 2**63


def encode(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    """What json.dumps() takes; tensors go to `tensors`, by path. Raises CheckpointError that names the path."""
    if isinstance(value, torch.Tensor):
        tensors[path] = value.detach().cpu().contiguous()
        return {"<tensor>": path}
    if type(value).__module__ == "numpy" and hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else {"<float>": str(value)}
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= LARGEST:
        return {"<int>": str(value)}
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, (list, tuple, set, frozenset)):
        items = [encode(item, f"{path}/{index}", tensors) for index, item in enumerate(value)]
        return items if isinstance(value, list) else {f"<{type(value).__name__}>": items}
    if isinstance(value, Mapping):
        # Keys of any kind: an optimizer's state has numbers.
        pairs = [[encode(key, path, tensors), encode(item, f"{path}/{key}", tensors)] for key, item in value.items()]
        return {"<counter>" if isinstance(value, collections.Counter) else "<dict>": pairs}
    raise CheckpointError(
        f"{path} is of type {type(value).__name__}; a checkpoint holds numbers, text, tensors, and lists, tuples, sets "
        "and dicts of them"
    )


_MADE: dict[str, Callable[[Any], Any]] = {
    "<float>": float,
    "<int>": int,
    "<tuple>": tuple,
    "<set>": set,
    "<frozenset>": frozenset,
    "<dict>": dict,
    "<counter>": lambda pairs: collections.Counter(dict(pairs)),
}


def decode(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """What encode() was given."""
    if isinstance(value, list):
        return [decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    return tensors[inner] if kind == "<tensor>" else _MADE[kind](decode(inner, tensors))
