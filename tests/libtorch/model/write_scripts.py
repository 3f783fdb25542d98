"""Writes the TorchScript files of torchscript_test.cpp: write_scripts.py FOLDER."""
import pathlib
import sys
import warnings

import torch
from torch import Tensor, nn
from torch.nn import functional


class Classifier(nn.Module):
    """Has buffers, because of BatchNorm."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


class DictOutput(Classifier):
    def forward(self, input: Tensor, target: Tensor) -> dict[str, Tensor]:
        logits = self.layers(input)
        accuracy = (logits.argmax(1) == target).float().mean()
        return {"accuracy": accuracy, "logits": logits, "loss": functional.cross_entropy(logits, target)}


class TupleOutput(Classifier):
    """Returns (loss, logits). Its arguments have another order than the batch's fields, and one has a default."""

    def forward(self, target: Tensor, input: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        logits = self.layers(input) * scale
        return functional.cross_entropy(logits, target), logits


class LoneTensor(Classifier):
    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(self.layers(input), target)


class TwoLosses(Classifier):
    """Returns a loss for each sample instead of the scalar that a model must return."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(self.layers(input), target, reduction="none")


class DictWithoutLoss(Classifier):
    def forward(self, input: Tensor, target: Tensor) -> dict[str, Tensor]:
        return {"logits": self.layers(input), "target": target}


class NoTensor(Classifier):
    def forward(self, input: Tensor, target: Tensor) -> int:
        return input.size(0)


class Raises(Classifier):
    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        if input.size(0) > 5:
            raise ValueError(f"{input.size(0)} elements are too many")
        return functional.cross_entropy(self.layers(input), target)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(4, 4, bias=False)
        self.decoder = nn.Linear(4, 4, bias=False)
        self.decoder.weight = self.encoder.weight

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(self.decoder(torch.tanh(self.encoder(input))), target)


class Overlapping(nn.Module):
    """One parameter is a row of another."""

    def __init__(self):
        super().__init__()
        rows = torch.randn(3, 4)
        self.rows = nn.Parameter(rows)
        self.first_row = nn.Parameter(rows[0])

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy((input + self.first_row) @ self.rows.t(), target)


def main():
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    folder = pathlib.Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    for kind in (DictOutput, TupleOutput, LoneTensor, TwoLosses, DictWithoutLoss, NoTensor, Raises, Tied, Overlapping):
        torch.jit.script(kind()).save(str(folder / f"{kind.__name__}.pt"))


if __name__ == "__main__":
    main()
