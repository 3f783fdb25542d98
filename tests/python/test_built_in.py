"""Built-in sources feed models of Python."""

from __future__ import annotations

import pathlib

import torch

import accelmgr


class Bigrams(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(256, 256)

    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self.table(input).flatten(0, 1), target.flatten())


def test_module_is_fed_by_the_source_of_text(tmp_path: pathlib.Path) -> None:
    """The default of model.kind, which cannot read text, has nothing to say about a module."""
    text = tmp_path / "text"
    text.write_bytes(b"abcd" * 64)
    model = Bigrams()
    with accelmgr.Manager(
        model,
        "text",
        data={"files": [str(text)], "sequence_length": 16},
        nprocs=1,
        batch_size_per_device=2,
        step_timeout=60,
        runners__threads=1,
    ) as manager:
        optimizer = torch.optim.SGD(model.parameters(), lr=50.0)
        losses = []
        for result in manager.steps(10):
            losses.append(result.loss)
            optimizer.step()
            manager.zero_grad()
    assert losses[-1] < losses[0] / 2
    assert model.table.weight[ord("a")].argmax() == ord("b")
