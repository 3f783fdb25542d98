"""A model that interprets programs. A program is a tensor that describes a random autograd graph.

Programs are elements of the data, so that one manager runs all graphs.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

SIDE = 264  # A square has 272 KiB. A tall matrix, four squares high, has 1.1 MiB: its copy goes past the caches.
SQUARES, TALLS = 4, 2  # Parameters of each shape.
ROWS = 8  # Largest number of rows of a program.
LARGEST = 30.0  # Larger values are scaled down, so that no graph overflows.

Binary = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Twice(torch.autograd.Function):
    """A custom autograd function that returns the same tensor as both gradients."""

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a + b

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return gradients[0], gradients[0]


def twice(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = Twice.apply(a, b)  # type: ignore[no-untyped-call]
    return made


def halves_changed(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    first, second = torch.cat([a, b], dim=-1).split([SIDE // 2, 2 * SIDE - SIDE // 2], -1)
    return second[:, :SIDE] + torch.cat([first, first], dim=-1)


def attention(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return nn.functional.scaled_dot_product_attention(a[None, :8], b[None], b[None] + a[None])[0].mean(dim=0) + a


# Operations that make a square of two squares.
SQUARE: list[Binary] = [
    lambda a, b: a @ b / SIDE**0.5,
    lambda a, b: nn.functional.linear(a, b) / SIDE**0.5,
    lambda a, b: torch.einsum("ij,kj->ki", a, b) / SIDE**0.5,
    lambda a, b: torch.bmm(torch.stack([a, b]), torch.stack([b, a])).mean(dim=0) / SIDE**0.5,
    lambda a, b: torch.addmm(a, a, b, alpha=SIDE**-0.5),
    lambda a, b: a + b,
    lambda a, b: a - b,
    lambda a, b: a * b,
    lambda a, b: torch.lerp(a, b, 0.3),
    torch.maximum,
    lambda a, b: torch.addcmul(a, a, b, value=0.5),
    lambda a, b: torch.where(a > b, a, b * 0.5),
    lambda a, b: torch.stack([a, b, a]).sum(dim=0),
    lambda a, b: a.index_add(0, torch.arange(SIDE) % 5, b),
    lambda a, b: nn.functional.embedding(torch.arange(SIDE) * 7 % SIDE, a) + b,
    lambda a, b: nn.functional.layer_norm(a, (SIDE,), b[0], b[1]),
    lambda a, b: a.clone().mul_(0.5).add_(b),
    lambda a, b: a.reshape(-1).view_as(b) + b.T.contiguous().T,
    twice,
    halves_changed,
    attention,
]

# Operations that make a tall matrix of two tall matrices.
TALL: list[Binary] = [
    lambda a, b: a + b,
    lambda a, b: a * b,
    lambda a, b: torch.where(a > b, a, b),
    lambda a, b: torch.cat([a[SIDE:], b[:SIDE]]),
    lambda a, b: torch.stack([a, b]).mean(dim=0),
    twice,
]


def lstm_cell(a: torch.Tensor, b: torch.Tensor, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    hidden, state = torch.lstm_cell(a[:4], (b[:4], a[4:8]), one, other)
    return torch.cat([hidden, state, a[8:]])


class Interpreter(nn.Module):
    """The loss is a weighted mean of the last two values of a program, with a different weight for each element."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.squares = nn.ParameterList(torch.randn(SIDE, SIDE, generator=generator) for _ in range(SQUARES))
        self.talls = nn.ParameterList(torch.randn(4 * SIDE, SIDE, generator=generator) / 16 for _ in range(TALLS))

    def _do(self, operation: int, a: torch.Tensor, b: torch.Tensor, one: torch.Tensor, other: torch.Tensor) -> Any:
        if operation < len(SQUARE):
            return SQUARE[operation](a, b)
        operation -= len(SQUARE)
        if operation < len(TALL):
            return TALL[operation](one, other).view(4, SIDE, SIDE).sum(dim=0) + a
        return lstm_cell(a, b, one, other)

    def forward(self, programs: torch.Tensor) -> torch.Tensor:
        values: list[torch.Tensor] = list(self.squares)
        for operation, first, second in programs[0].tolist():
            if operation < 0:
                break
            made = self._do(
                operation,
                values[first % len(values)],
                values[second % len(values)],
                self.talls[first % TALLS],
                self.talls[second // 2 % TALLS],
            )
            largest = made.detach().abs().max().item()
            values.append(made if largest <= LARGEST else made / largest)
        weights = torch.arange(SIDE * SIDE, dtype=torch.float32).view(SIDE, SIDE).cos()
        return torch.stack([(value * weights).mean() for value in values[-2:]]).sum()


OPERATIONS = len(SQUARE) + len(TALL) + 1


def program_of(rows: list[tuple[int, int, int]]) -> torch.Tensor:
    """Each row has the number of an operation and of its two operands."""
    program = torch.full((ROWS, 3), -1)
    if rows:
        program[: len(rows)] = torch.tensor(rows)
    return program


class Programs:
    """A dataset to which the test adds elements while a manager runs."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[torch.Tensor | None] = queue.SimpleQueue()

    def put(self, program: torch.Tensor) -> None:
        self._queue.put(program)

    def end(self) -> None:
        self._queue.put(None)

    def __iter__(self) -> Iterator[torch.Tensor]:
        """Blocks until there is a program; ends after end()."""
        while (program := self._queue.get()) is not None:
            yield program
