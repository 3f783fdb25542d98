"""What the examples with several machines compute, in plain PyTorch: tools/examples/licence_gpt.py, a mean, AdamW."""

from __future__ import annotations

import pathlib
import sys

import torch

EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "tools" / "examples"
sys.path.insert(0, str(EXAMPLES))
from licence_gpt import Gpt, Sequences, held_out_loss  # noqa: E402

BATCH, CONTEXT = 4, 32
SMALL = ["--layers=2", "--width=32", f"--context={CONTEXT}", f"--batch-size={BATCH}"]  # Options of the examples.


def small_gpt() -> Gpt:
    torch.manual_seed(0)
    return Gpt(2, 32, heads=4, context=CONTEXT)


def loss_of(model: Gpt, indices: list[int]) -> torch.Tensor:
    """The loss of the elements with these indices."""
    data = Sequences(1 << 40, CONTEXT)
    rows = [data[index] for index in indices]
    loss: torch.Tensor = model(*(torch.stack([row[name] for row in rows]) for name in ("input", "target")))["loss"]
    return loss


def elements(batch: int, machine: int, machines: int) -> list[int]:
    """Indices of the elements of a batch of a machine. Batches are counted from 0."""
    return [machine + machines * (batch * BATCH + row) for row in range(BATCH)]


def losses_of(steps: list[tuple[int, list[int]]], machines: int, rate: float = 5e-3) -> list[float]:
    """The loss of each step, and the held-out loss. `steps`: the batch, and the machines whose mean gradient counts."""
    model = small_gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    losses = []
    for batch, living in steps:
        optimizer.zero_grad()
        losses.append(0.0)
        for machine in living:
            loss = loss_of(model, elements(batch, machine, machines)) / len(living)
            loss.backward()  # type: ignore[no-untyped-call]
            losses[-1] += loss.item()
        optimizer.step()
    return [*losses, held_out_loss(model, CONTEXT)]
