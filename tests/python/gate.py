"""A model that dies, raises, returns NaN or blocks in a runner when the test creates a file; and a dataset."""

from __future__ import annotations

import contextlib
import os
import pathlib
import select
import signal

import torch
from torch import nn


class Gate:
    """A fifo: while it exists, a process in pass_through() blocks until the test opens and closes it."""

    def __init__(self, path: pathlib.Path) -> None:
        self._path = path

    def shut(self) -> None:
        os.mkfifo(self._path)

    def pass_through(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            fd = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK)
            try:
                # Without a name the fifo was closed before this process opened it, and nobody would open it again.
                if os.fstat(fd).st_nlink > 0:
                    closed = select.poll()
                    closed.register(fd, 0)
                    closed.poll()
            finally:
                os.close(fd)

    @contextlib.contextmanager
    def held(self):
        """Waits until a process blocks in pass_through(), and holds it there until the end of the block."""
        fd = os.open(self._path, os.O_WRONLY)
        try:
            yield
        finally:
            self._path.unlink()
            os.close(fd)


class Told(nn.Module):
    """loss = mean of weight * x. Before that the runner removes a command file from `folder` and obeys it."""

    def __init__(self, folder: pathlib.Path) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, 2.0]))
        self._folder = folder
        self.gate = Gate(folder / "gate")

    def tell(self, what: str) -> None:
        """`what` is `die`, `raise` or `nan`. The first runner that removes the file does it, once."""
        (self._folder / what).touch()

    def _told(self, what: str) -> bool:
        try:
            (self._folder / what).unlink()
        except FileNotFoundError:
            return False
        return True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.gate.pass_through()
        if self._told("die"):
            os.kill(os.getpid(), signal.SIGKILL)
        if self._told("raise"):
            self._give_up()
        loss = (self.weight * x).mean()
        return loss * float("nan") if self._told("nan") else loss

    def _give_up(self) -> None:
        raise ArithmeticError("told to raise")


class Count:
    """Element i is [i, 1], so that the gradient shows which elements a step had."""

    def __iter__(self):
        i = 0
        while True:
            yield torch.tensor([float(i), 1.0])
            i += 1
