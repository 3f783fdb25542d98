# Runs in: the host and the manager.
"""Values in a checkpoint, as JSON and tensors: states of an optimizer, a scheduler or a dataset, values of the user."""

from __future__ import annotations

import base64
import collections
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from accelmgr._memory.tensors import dense_over, dtype_name, order_of, ordered
from accelmgr.errors import CheckpointError

LARGEST = 2**63


def encode(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    """Encodes `value` for json.dumps(); puts its tensors into `tensors`, by path.

    Raises CheckpointError, which names the path, for a value that a checkpoint cannot hold.
    """
    if isinstance(value, torch.Tensor):
        own = value.detach().cpu()
        tensors[path] = own.contiguous()
        order = order_of(own)  # Files hold row-major tensors; the state of a channels_last parameter is not.
        return {"<tensor>": path if order is None else [path, order]}
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, float):
        return value if math.isfinite(value) else {"<float>": str(value)}
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= LARGEST:
        return {"<int>": str(value)}
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, bytes):
        return {"<bytes>": base64.b64encode(value).decode()}
    if isinstance(value, (list, tuple, set, frozenset)):
        items = [encode(item, f"{path}/{index}", tensors) for index, item in enumerate(value)]
        return items if isinstance(value, list) else {f"<{type(value).__name__}>": items}
    if isinstance(value, Mapping):
        # Pairs, not a JSON object: keys may be of any kind; an optimizer's state has numbers.
        pairs = [[encode(key, path, tensors), encode(item, f"{path}/{key}", tensors)] for key, item in value.items()]
        return {"<counter>" if isinstance(value, collections.Counter) else "<dict>": pairs}
    raise CheckpointError(
        f"{path} is of type {type(value).__name__}; a checkpoint holds numbers, text, tensors, and lists, tuples, sets "
        "and dicts of them"
    )


_MADE: dict[str, Callable[[Any], Any]] = {
    "<float>": float,
    "<int>": int,
    "<bytes>": base64.b64decode,
    "<tuple>": tuple,
    "<set>": set,
    "<frozenset>": frozenset,
    "<dict>": dict,
    "<counter>": lambda pairs: collections.Counter(dict(pairs)),
}


def decode(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Rebuilds the value that encode() has encoded."""
    if isinstance(value, list):
        return [decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    if kind != "<tensor>":
        return _MADE[kind](decode(inner, tensors))
    path, order = (inner, None) if isinstance(inner, str) else inner
    return ordered(tensors[path], order and tuple(order))


def as_text(tensor: torch.Tensor) -> list[Any]:
    """The whole tensor in JSON."""
    content = tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    return [dtype_name(tensor.dtype), list(tensor.shape), base64.b64encode(content).decode()]


def from_text(text: list[Any]) -> torch.Tensor:
    name, shape, content = text
    return dense_over(bytearray(base64.b64decode(content)), name, tuple(shape))
