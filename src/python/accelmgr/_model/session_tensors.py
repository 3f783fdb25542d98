# Runs in: the host, the manager and runners.
"""The tensors of a model that the session holds, by name."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from accelmgr._model.constants import Constants
from accelmgr.errors import ModelError


def leaves_of(parameter: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """The tensors that have the memory of a parameter: itself, or those inside a quantized one (torchao), by suffix.

    Tensors of torch.quantize_per_tensor() and the like have none: each process has a copy, sent with the model.
    """
    if parameter.is_quantized:
        return []
    if not is_traceable_wrapper_subclass(parameter):
        return [("", parameter)]
    names, _ = parameter.__tensor_flatten__()
    inner = [(name, getattr(parameter, name)) for name in names]
    return [(f".{name}{suffix}", leaf) for name, tensor in inner for suffix, leaf in leaves_of(tensor)]


def named_leaves(model: torch.nn.Module, remove_duplicate: bool = True) -> list[tuple[str, torch.Tensor]]:
    """What the session holds of a model's parameters, and large buffers that nobody changes."""
    named = model.named_parameters(remove_duplicate=remove_duplicate)
    leaves = [(name + suffix, leaf) for name, parameter in named for suffix, leaf in leaves_of(parameter)]
    return leaves + Constants(model).named


def named_buffers(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """What the session holds of a model's buffers."""
    constants = dict(Constants(model).named)
    return [
        (name, buffer) for name, buffer in model.named_buffers() if not buffer.is_quantized and name not in constants
    ]


def tensors_of(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Parameters (named_leaves()), then buffers, each tensor once under its first name."""
    for name, parameter in model.named_parameters():
        if isinstance(parameter, torch.nn.parameter.UninitializedParameter):
            raise ModelError(f"parameter '{name}' of the model is not initialized; call the model once first")
    return [*named_leaves(model), *named_buffers(model)]
