# Runs in: runners.
"""Hands gradients from autograd to the runner, parameter by parameter."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence

import torch

from accelmgr import _native
from accelmgr._memory.tensors import order_of, ordered
from accelmgr.errors import ModelError

GRADIENT = operator.attrgetter("grad")

Kept = list[tuple[torch.Tensor, torch.Tensor]]


def set_aside(parameters: Iterable[torch.Tensor]) -> Kept:
    """Takes `.grad` away, so that forward() finds none of another micro-batch, and can drop only its own."""
    kept = [(parameter, gradient) for parameter in parameters if (gradient := parameter.grad) is not None]
    for parameter, _ in kept:
        parameter.grad = None
    return kept


def put_back(kept: Kept) -> None:
    """Adds what forward() has left in `.grad` to what set_aside() took away."""
    with torch.no_grad():
        for parameter, total in kept:
            if parameter.grad is not None:
                total = total.add_(parameter.grad) if total.layout is torch.strided else total + parameter.grad
            parameter.grad = total


def real_of(gradient: torch.Tensor) -> torch.Tensor:
    """The gradient as real numbers."""
    return torch.view_as_real(gradient) if gradient.is_complex() else gradient


class GradientHooks:
    """Hands gradients to the runner, by a hook on each parameter.

    What counts of a micro-batch is what `.grad` holds after the backward pass of its loss, as in plain PyTorch.
    forward() may have backward passes of its own before: what they leave in `.grad` is added, unless forward() drops
    it.

    The runner copies the first gradient of an attempt and adds later ones. The hook leaves `.grad` None, so that
    autograd never adds. If the user has a post-accumulate hook on the parameter, `.grad` is kept until rest(), and the
    user's hook sees the sum over micro-batches. Where an inner step needs no other replica, all gradients stay in
    `.grad`.
    """

    def __init__(self, names: Sequence[str], parameters: Sequence[torch.Tensor], runner: _native.RunnerSide) -> None:
        """names: the parameters' names, for errors."""
        self._names = names
        self._parameters = parameters
        self._orders = list(map(order_of, parameters))
        self._runner = runner
        self._hooked = [False] * len(parameters)
        self.keeps = False  # The runner takes none in this attempt.
        self._counts = False  # The backward pass of the loss is under way.
        self._kept: Kept = []
        self.hook()

    def hook(self) -> None:
        """Adds missing hooks. Call it again when further parameters require gradients."""
        for index, parameter in enumerate(self._parameters):
            if parameter.requires_grad and not self._hooked[index]:
                self._hooked[index] = True
                parameter.register_post_accumulate_grad_hook(self._hook(index))  # type: ignore[no-untyped-call]

    def _hook(self, index: int) -> Callable[[torch.Tensor], None]:
        def hook(parameter: torch.Tensor) -> None:
            if self._counts and not self._is_kept(parameter):
                self._hand_over(index)

        return hook

    def _is_kept(self, parameter: torch.Tensor) -> bool:
        return self.keeps or len(parameter._post_accumulate_grad_hooks or ()) > 1

    def _dense(self, index: int, gradient: torch.Tensor) -> torch.Tensor:
        """The gradient as the session has it: in the dtype and the order of its parameter."""
        parameter = self._parameters[index]
        if self._is_as_in_session(index, gradient):
            return gradient
        dense = gradient.detach() if gradient.layout is torch.strided else gradient.to_dense()
        if dense.shape != parameter.shape:  # A hook has called resize_().
            raise ModelError(
                f"parameter '{self._names[index]}' is {list(parameter.shape)}, its gradient {list(dense.shape)}"
            )
        return ordered(dense.to(parameter.dtype).resolve_conj().resolve_neg(), self._orders[index])

    def _is_as_in_session(self, index: int, gradient: torch.Tensor) -> bool:
        parameter, order = self._parameters[index], self._orders[index]
        return (
            gradient.layout is torch.strided
            and gradient.dtype is parameter.dtype
            and gradient.shape == parameter.shape
            and (gradient.is_contiguous() if order is None else gradient.stride() == order)
            and not (gradient.requires_grad or gradient.is_conj() or gradient.is_neg())
        )

    def _hand_over(self, index: int) -> None:
        parameter = self._parameters[index]
        gradient = parameter.grad
        parameter.grad = None
        if gradient is not None:
            dense = self._dense(index, gradient)  # May be a copy, which must live until it is read.
            self._runner.capture(index, dense.data_ptr())

    def begin_micro_batch(self) -> None:
        """Requires: forward() has not begun."""
        self._kept = set_aside(parameter for parameter, _ in self._kept)

    def begin_backward(self) -> None:
        self._runner.backward_begins()
        put_back(self._kept)
        self._counts = True

    def end_backward(self) -> None:
        """Hands over what backward passes of forward() have left for parameters on which the loss does not depend."""
        self._counts = False
        self._kept = []
        for index, gradient in enumerate(map(GRADIENT, self._parameters)):
            if gradient is None:
                continue
            if self._is_kept(self._parameters[index]):
                self._kept.append((self._parameters[index], gradient))
            else:
                self._hand_over(index)

    def begin_attempt(self) -> None:
        self.keeps = self._runner.keeps_gradients()
        self.forget()

    def forget(self) -> None:
        """Drops the gradients of an attempt."""
        self._counts = False
        self._kept = []
        for parameter, gradient in zip(self._parameters, map(GRADIENT, self._parameters), strict=True):
            if gradient is not None:
                parameter.grad = None

    def rest(self) -> None:
        """Hands over what is still in `.grad`.

        Requires: the last backward pass of the attempt has ended.
        """
        self._kept = []
        for index, gradient in enumerate(map(GRADIENT, self._parameters)):
            if gradient is None:
                continue
            if not self.keeps:
                self._hand_over(index)
                continue
            kept = self._parameters[index].grad = self._dense(index, gradient)
            self._runner.look_at(index, kept.data_ptr())
