# Runs in: runners.
"""Tells the transport of gradients on a device, as soon as backward has completed each."""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence

import torch

from accelmgr import _native
from accelmgr._runner.cuda import Cuda
from accelmgr._runner.gradient_hooks import GradientHooks, real_of, set_aside
from accelmgr.errors import DeviceError


class CudaGradientHooks(GradientHooks):
    """Tells the transport of gradients, by a hook on each parameter. `.grad` has the sum over micro-batches.

    A hook runs in a thread of autograd. The first attempt shows in which order gradients become complete, and which
    parameters backward comes to several times: only rest() tells of these. rest() also tells of parameters with hooks
    of the user, which may change `.grad`.
    """

    def __init__(
        self,
        names: Sequence[str],
        parameters: Sequence[torch.Tensor],
        runner: _native.RunnerSide,
        transport: _native.CudaTransport,
        cuda: Cuda,
    ) -> None:
        self._transport = transport
        self._cuda = cuda
        self._eager = False  # An attempt has been seen as a whole.
        self._last = False
        self._order: list[int] = []  # Parameters as autograd came to them in this micro-batch.
        self._recorded: list[int] | None = None  # Gradients completed in the graph that is recorded; None: none is.
        self._late = [False] * len(parameters)
        self._told = [False] * len(parameters)
        self._looked_at: dict[int, torch.Tensor] = {}  # The gradients, as the device copies or keeps them.
        super().__init__(names, parameters, runner)

    def _hook(self, index: int) -> Callable[[torch.Tensor], None]:
        def hook(parameter: torch.Tensor) -> None:
            self._order.append(index)
            if self.keeps or not self._last or not self._eager or self._late[index] or parameter.grad is None:
                return
            if len(parameter._post_accumulate_grad_hooks) > 1 or parameter.grad.layout is not torch.strided:
                return
            if self._told[index] or (self._recorded is not None and index in self._recorded):
                raise DeviceError(
                    f"backward came to parameter '{self._names[index]}' a second time, after the device was told to "
                    "copy its gradient"
                )
            if self._recorded is None:
                self._tell(index, parameter.grad)
            elif self._is_as_copied(index, parameter.grad):
                self._join()
                self._transport.complete_in_graph(index)
                self._recorded.append(index)

        return hook

    def _join(self) -> None:
        """The compute stream waits for what is queued here: the model may have a stream of its own."""
        stream = self._cuda.current_stream()
        if stream != self._cuda.compute_stream:
            self._transport.join(stream)

    def _is_as_copied(self, index: int, gradient: torch.Tensor) -> bool:
        """Whether the transport may copy its memory as it is."""
        parameter = self._parameters[index]
        same = gradient.shape == parameter.shape and gradient.dtype == parameter.dtype
        order = self._orders[index]
        in_order = gradient.is_contiguous() if order is None else gradient.stride() == order
        dense = in_order and not gradient.is_conj() and not gradient.is_neg()
        return same and dense and not self._transport.rounds(index)

    def _tell(self, index: int, gradient: torch.Tensor) -> None:
        dense = self._dense(index, gradient)
        if self.keeps:
            self._looked_at[index] = self._parameters[index].grad = dense
            return self._join()
        if self._transport.rounds(index):
            dense = real_of(dense).to(torch.bfloat16)
        self._looked_at[index] = dense
        self._told[index] = True
        self._join()  # Behind what has made it dense and has rounded it.
        self._transport.written(index, dense)

    def of_last_micro_batch(self) -> bool:
        return self._runner.last_micro_batch()

    def begin_backward(self) -> None:
        super().begin_backward()
        self._last = self._runner.last_micro_batch()

    def end_backward(self) -> None:
        self._last = self._counts = False
        if len(set(self._order)) < len(self._order):
            for index, times in collections.Counter(self._order).items():
                self._late[index] |= times > 1

    def begin_micro_batch(self) -> None:
        self._order = []
        self._kept = []

    def begin_forward(self) -> None:
        """Call it in computing(), unless a graph is launched instead."""
        self._kept = set_aside(self._parameters)

    def begin_recording(self) -> None:
        self._recorded = []

    def end_recording(self) -> tuple[list[int], list[int]]:
        complete, self._recorded = self._recorded or [], None
        order, self._order = self._order, []
        return order, complete

    def replayed(self, order: list[int], complete: list[int]) -> None:
        """Called when a graph was launched. Tells of the gradients that are complete according to its recording."""
        self._runner.backward_begins()
        self._order = order
        for index in complete if not self.keeps else ():
            if self._transport.rounds(index):  # It was recorded in a team.
                continue
            gradient = self._parameters[index].grad
            assert gradient is not None
            self._told[index] = True
            self._looked_at[index] = gradient
            self._transport.written(index, gradient, in_graph=True)

    def forget(self) -> None:
        self._looked_at, self._order = {}, []
        self._told = [False] * len(self._parameters)
        super().forget()

    def rest(self) -> None:
        order = dict.fromkeys([*self._order, *range(len(self._parameters))])
        for index in order:
            gradient = self._parameters[index].grad
            if gradient is not None and not self._told[index]:
                self._tell(index, gradient)
        self._eager = True

    @torch.no_grad()
    def magnitudes(self) -> tuple[list[int], torch.Tensor]:
        """Parameters whose gradients have elements, and the largest magnitude of each: Inf or NaN if it has one.

        Requires: rest() was called.
        """
        found = {index: real_of(gradient) for index, gradient in self._looked_at.items() if gradient.numel()}
        if not found:
            return [], torch.empty(0, dtype=torch.float64, device=self._cuda.device)
        norms = torch._foreach_norm(list(found.values()), torch.inf)
        return list(found), torch.stack(norms).to(torch.float64)
