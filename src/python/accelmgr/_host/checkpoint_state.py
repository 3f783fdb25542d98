# Runs in: the host.
"""What the host adds to a checkpoint: states of optimizer and scheduler, values of the user."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from accelmgr import _native
from accelmgr._serialization.checkpoint_values import decode, encode
from accelmgr.errors import CheckpointError

_STATES = "accelmgr"  # The key of our own values in the JSON of a checkpoint, beside the keys of the user.


def savable(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors by name, detached and row-major. Raises CheckpointError for one that a checkpoint cannot hold."""
    for name, tensor in tensors.items():
        if tensor.device.type != "cpu" or tensor.layout != torch.strided:
            raise CheckpointError(
                f"'{name}' is a tensor on {tensor.device}, {tensor.layout}; a checkpoint holds dense tensors of real "
                "numbers on the CPU"
            )
    return {name: tensor.detach().resolve_neg().contiguous() for name, tensor in tensors.items()}


def collected(
    extra: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], owners: Mapping[str, Any]
) -> tuple[str, dict[str, torch.Tensor]]:
    """JSON and tensors of a checkpoint. owners: what has a state_dict(), by name; None is left out."""
    values, every = dict(extra), dict(tensors)
    saved = {what: encode(owner.state_dict(), what, every) for what, owner in owners.items() if owner is not None}
    if saved:
        values[_STATES] = saved
    kept = savable(every)
    return json.dumps(values), kept


def restored(resumed: _native.Resumed, owners: Mapping[str, Any]) -> dict[str, Any]:
    """Loads the states that collected() has saved; returns its `extra`. Raises CheckpointError if one is not there."""
    values: dict[str, Any] = json.loads(resumed.json)
    saved = values.pop(_STATES, {})
    tensors = dict(resumed.tensors)
    wanted = {what: owner for what, owner in owners.items() if owner is not None}
    for what in wanted:
        if what not in saved:
            raise CheckpointError(
                f"{resumed.path} has no state of the {what}; save it with save_checkpoint({what}=...)"
            )
    for what, owner in wanted.items():
        owner.load_state_dict(decode(saved[what], tensors))
    return values
