"""Checks that built-in data sources feed Python models, and what built-in models refuse."""

from __future__ import annotations

import pathlib

import pytest
import torch

import accelmgr
from accelmgr._host import program


class Bigrams(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(256, 256)

    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self.table(input).flatten(0, 1), target.flatten())


def test_module_is_fed_by_the_source_of_text(tmp_path: pathlib.Path) -> None:
    """The default of model.kind cannot read text, but a module ignores model.kind."""
    text = tmp_path / "a, 'b' [c]"  # No character of the name may be taken for a separator.
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
        optimizer, losses = torch.optim.SGD(model.parameters(), lr=50.0), []
        for result in manager.steps(10):
            losses.append(result.loss)
            optimizer.step()
            manager.zero_grad()
    assert losses[-1] < losses[0] / 2
    assert model.table.weight[ord("a")].argmax() == ord("b")


def test_built_in_model_without_the_program_says_where_it_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "_is_program", lambda path: False)
    with pytest.raises(accelmgr.ModelError, match="model 'mlp' is computed by libtorch in the program accelmgr"):
        accelmgr.Manager("mlp", "synthetic", nprocs=1)


def test_built_in_model_reads_no_dataset_of_python() -> None:
    with pytest.raises(accelmgr.ConfigError, match="reads no dataset of Python"):
        accelmgr.Manager("mlp", [{"input": torch.zeros(3)}], nprocs=1)
