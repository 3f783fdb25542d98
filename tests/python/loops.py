"""Runs a training loop with plain PyTorch in one process, and with a manager of one runner; compares bit for bit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from oracle import call, loss_of
from torch import nn
from torch.utils.data import default_collate

import accelmgr


class Compute(Protocol):
    """What a script uses of plain PyTorch or of a manager."""

    def __call__(self, repeat: bool = False) -> float:
        """Computes gradients of the next batch, or of the last one again. Returns the loss."""

    def rebind(self, model: nn.Module | None = None) -> None:
        """The model has other parameters from now on; or another model has them."""


class Plain:
    def __init__(self, model: nn.Module, batches: Iterable[Sequence[Any]]) -> None:
        self.model = model
        self.losses: list[float] = []
        self._batches = iter(batches)

    def __call__(self, repeat: bool = False) -> float:
        if not repeat:
            self._batch = default_collate(next(self._batches))
        loss = loss_of(call(self.model, self._batch))
        loss.backward()
        self.losses.append(loss.item())
        return self.losses[-1]

    def rebind(self, model: nn.Module | None = None) -> None:
        self.model = model or self.model


class Managed:
    def __init__(self, manager: accelmgr.Manager) -> None:
        self.manager = manager
        self.losses: list[float] = []

    def __call__(self, repeat: bool = False) -> float:
        result = self.manager.step(repeat=repeat)
        result.raise_for_status()
        self.losses.append(result.loss)
        return result.loss

    def rebind(self, model: nn.Module | None = None) -> None:
        self.manager.rebind(model)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """With as many threads as a runner has, sums are rounded alike."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def compare(
    make: Callable[[], Any],
    elements: Sequence[Any],
    script: Callable[[Any, Compute], None],
    batch: int,
    start_method: str = "auto",
) -> None:
    """Checks that losses, tensors and gradients are the same."""
    torch.manual_seed(3)
    expected, model = make(), make()
    model.load_state_dict(expected.state_dict())
    torch.manual_seed(4)
    plain = Plain(expected, torch.utils.data.BatchSampler(elements, batch, drop_last=True))
    script(expected, plain)
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(4)
    with accelmgr.Manager(
        model,
        elements,
        nprocs=1,
        batch_size_per_device=batch,
        start_method=start_method,
        runners__threads=1,
        data={"keep_last_step": True},
    ) as manager:
        managed = Managed(manager)
        script(model, managed)
    assert managed.losses == plain.losses
    found, wanted = manager.model.state_dict(), plain.model.state_dict()
    assert list(found) == list(wanted)
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, wanted[name], rtol=0, atol=0, msg=name)
    gradients = [[parameter.grad for parameter in each.parameters()] for each in (manager.model, plain.model)]
    for one, other in zip(*gradients, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)
