"""Computes in one process, with plain PyTorch, what a step of several runners must add to the gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.utils.data

# Tolerance for float32 sums in a different order.
CLOSE = {"rtol": 1e-5, "atol": 1e-7}


def call(model: torch.nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)


def loss_of(outputs: Any) -> torch.Tensor:
    if isinstance(outputs, Mapping):
        return outputs["loss"]
    return outputs[0] if isinstance(outputs, (tuple, list)) else outputs


class Oracle:
    """Trains a copy of the model on the same elements as the manager."""

    def __init__(
        self,
        model: torch.nn.Module,
        elements: Iterable[Any],
        *,
        nprocs: int = 1,
        batch_size_per_device: int = 1,
        grad_accumulation_steps: int = 1,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        self.model = copy.deepcopy(model)
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self._elements = iter(elements)
        self._nprocs, self._batch, self._accumulation = nprocs, batch_size_per_device, grad_accumulation_steps
        self._collate = collate_fn or torch.utils.data.default_collate

    def step(self) -> float:
        """Adds the mean gradient of one step and returns its mean loss."""
        dealt = [next(self._elements) for _ in range(self._nprocs * self._batch * self._accumulation)]
        mean = 0.0
        for rank in range(self._nprocs):
            own = dealt[rank :: self._nprocs]
            for first in range(0, len(own), self._batch):
                loss = loss_of(call(self.model, self._collate(own[first : first + self._batch])))
                loss = loss / (self._accumulation * self._nprocs)
                loss.backward()
                mean += loss.item()
        return mean

    def gradients(self) -> list[torch.Tensor]:
        return [torch.zeros_like(p) if p.grad is None else p.grad for p in self.model.parameters()]

    def zero_grad(self) -> None:
        self.model.zero_grad(set_to_none=False)


def assert_equal(found: Iterable[torch.Tensor], expected: Iterable[torch.Tensor]) -> None:
    found, expected = list(found), list(expected)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.detach(), other.detach(), **CLOSE)
