# Runs in: runners.
"""Finds the loss and other numbers in what a model returns."""

from __future__ import annotations

import collections.abc
import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from accelmgr.errors import ModelError

Numbers = tuple[torch.Tensor, list[tuple[str, float | torch.Tensor]]]
"""The loss of a micro-batch, and other numbers by name. A device may still compute them."""

LOSS = "loss"


def _fields_of(outputs: Any) -> dict[str, Any] | None:
    """The fields of a mapping, a named tuple or a dataclass; None for others."""
    if isinstance(outputs, collections.abc.Mapping):  # transformers' ModelOutput is a dataclass too.
        return {str(name): value for name, value in outputs.items()}
    if isinstance(outputs, tuple) and hasattr(outputs, "_fields"):
        return dict(zip(outputs._fields, outputs, strict=True))
    if dataclasses.is_dataclass(outputs) and not isinstance(outputs, type):
        return {field.name: getattr(outputs, field.name) for field in dataclasses.fields(outputs)}
    return None


def _number_of(value: Any) -> float | torch.Tensor | None:
    """A real number of Python, NumPy, or torch (one element, at most one dimension), else None.

    A tensor is copied, and read later.
    """
    if isinstance(value, (bool, int, float)):
        return float(value)
    if isinstance(value, torch.Tensor):
        is_number = value.layout is torch.strided and value.dim() <= 1 and value.numel() == 1 and not value.is_complex()
        return value.detach().reshape(()).clone() if is_number else None
    if type(value).__module__ == "numpy" and getattr(getattr(value, "dtype", None), "kind", "") in "biuf":
        return float(value.item()) if value.ndim <= 1 and value.size == 1 else None
    return None


def _is_loss(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() == 1 and value.is_floating_point() and value.requires_grad


def _remedy(outputs: Any, place: int | str) -> str:
    """What to do about an output that is no loss."""
    if isinstance(outputs, (tuple, list)) and isinstance(place, int):
        other = next((index for index, value in enumerate(outputs) if index != place and _is_loss(value)), None)
        if other is not None:
            return f"element {other} of what the model returned is one: pass Manager(model, ..., loss={other})"
    return (
        "reduce it, by mean(); or, if the script computes the loss of what the model returns, pass that: "
        "Manager(model, ..., loss=function), which is called with outputs and batch"
    )


def _checked(loss: Any, outputs: Any, place: int | str) -> torch.Tensor:
    if not isinstance(loss, torch.Tensor):
        raise ModelError(
            f"the model's loss is of type {type(loss).__name__}; it must be a tensor: the output, its 'loss', or "
            f"its first element ({_remedy(outputs, place)})"
        )
    if loss.numel() != 1 or not loss.is_floating_point():
        raise ModelError(
            f"the loss is {loss.dtype} of shape {list(loss.shape)}; it must be one floating-point number "
            f"({_remedy(outputs, place)})"
        )
    if torch.is_grad_enabled() and not loss.requires_grad:
        raise ModelError("the loss does not require a gradient: it does not depend on a parameter, or was detached")
    return loss


def read_outputs(outputs: Any, place: int | str | None = None) -> Numbers:
    """The loss of a model's output, checked, and its other numbers.

    place: where the loss is, a position in a tuple or a name. None: the field `loss`, the first element of a tuple
    without names, or the output itself.
    """
    fields = _fields_of(outputs)
    is_sequence = isinstance(outputs, (tuple, list))
    if isinstance(place, int) or (place is None and is_sequence and fields is None):
        place = place or 0
        if not is_sequence:
            raise ModelError(
                f"loss={place} is a position in a tuple, and the model returned a {type(outputs).__name__}"
            )
        loss = _element(outputs, place)
        others = fields or {}
        if others:
            others.pop(list(others)[place])
        return _checked(loss, outputs, place), _numbers_of(others)
    if fields is None:
        if place is not None:
            raise ModelError(f"loss='{place}' is a name, and the model returned a {type(outputs).__name__} without any")
        return _checked(outputs, outputs, LOSS), []
    name = place or LOSS
    if name not in fields:
        raise ModelError(
            f"the model's output has no '{name}'; it has: {', '.join(fields)}. Name the loss, as in Manager("
            "model, ..., loss='nll'), or pass a function of outputs and batch that computes it"
        )
    return _checked(fields.pop(name), outputs, name), _numbers_of(fields)


def _element(outputs: Sequence[Any], place: int) -> Any:
    if -len(outputs) <= place < len(outputs):
        return outputs[place]
    what = f"a tuple of {len(outputs)}" if outputs else "an empty tuple"
    expected = "its first element must be the loss" if place == 0 else f"loss={place} is none of its elements"
    raise ModelError(f"the model returned {what}; {expected}")


def _numbers_of(fields: dict[str, Any]) -> list[tuple[str, float | torch.Tensor]]:
    return [(name, number) for name, value in fields.items() if (number := _number_of(value)) is not None]
