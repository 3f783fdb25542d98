# Runs in: the host, which sends its optimizer, and runners that are no forks of it.
"""How an optimizer travels: whole, with its state and hooks, but without parameters, which runners have themselves."""

from __future__ import annotations

from typing import Any

import torch

from accelmgr._memory.memfd import HostFile, open_memfd
from accelmgr._serialization.model_pickling import culprit
from accelmgr._serialization.pickling import CannotPickle, KnownPickler, KnownUnpickler, attempted
from accelmgr._updates.inner import Order
from accelmgr.errors import UsageError

NAME = "accelmgr-optimizer"


class _Pickler(KnownPickler):
    """Optimizer.__getstate__() would leave out what a class derived from it adds, and hooks."""

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, torch.optim.Optimizer):
            return super().reducer_override(obj)
        state = dict(vars(obj))
        if hasattr(state.get("step"), "_wrapped_by_lr_sched"):  # It counts the calls, for a scheduler of the host.
            del state["step"]
        return _made, (type(obj),), state


def _made(kind: type[torch.optim.Optimizer]) -> torch.optim.Optimizer:
    return kind.__new__(kind)


class SentOptimizer(HostFile):
    """The optimizer as it is when this is made. Each runner reads it once, before its first inner step."""

    def __init__(self, optimizer: torch.optim.Optimizer, leaves: list[torch.Tensor]) -> None:
        """leaves: the parameters of the session, in its order. Raises UsageError for what cannot be pickled."""
        super().__init__(NAME)
        numbers = {id(leaf): number for number, leaf in enumerate(leaves)}

        def write() -> None:
            with open(self.fd, "wb", closefd=False) as file:
                file.seek(0)
                _Pickler(file, numbers).dump(optimizer)

        try:
            attempted(write)
        except CannotPickle as error:
            raise UsageError(
                "the optimizer cannot be sent to runners, which are no forks of this process: "
                f"{culprit(optimizer, 'optimizer')}: {error}. Call optimizer.step() in the host"
            ) from error


def received(order: Order, parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    """In a runner: the optimizer that was sent. parameters: its own, in the order of the session."""
    pid, fd = order.sent.split(":")
    with open(open_memfd(pid, fd, NAME), "rb") as file:
        optimizer = KnownUnpickler(file, parameters).load()
    assert isinstance(optimizer, torch.optim.Optimizer)
    return optimizer
