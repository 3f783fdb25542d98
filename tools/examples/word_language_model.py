"""After word_language_model of pytorch/examples: a recurrent network, whose state goes from batch to batch.

word_language_model.py is word_language_model_plain.py with accelmgr; moving.md shows their difference.
"""

import math
import pathlib

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, Dataset

import accelmgr

ROWS, LENGTH = 20, 35  # The text is cut into 20 rows, which are read side by side, 35 words at a time.


class RNNModel(nn.Module):
    def __init__(self, words: int) -> None:
        super().__init__()
        self.encoder = nn.Embedding(words, 64)
        self.rnn = nn.GRU(64, 64, num_layers=2, batch_first=True)
        self.decoder = nn.Linear(64, words)
        self.register_buffer("hidden", None, persistent=False)

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        output, hidden = self.rnn(self.encoder(data), self.hidden)
        self.hidden = hidden.detach()
        return self.decoder(output).transpose(1, 2)


class Pieces(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Element i is the next piece of row i % ROWS: words, and the words that follow them."""

    def __init__(self, tokens: torch.Tensor) -> None:
        width = (len(tokens) - 1) // ROWS // LENGTH * LENGTH
        self.data = tokens[: ROWS * width].view(ROWS, width)
        self.target = tokens[1 : ROWS * width + 1].view(ROWS, width)

    def __len__(self) -> int:
        return self.data.numel() // LENGTH

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        row, begin = index % ROWS, index // ROWS * LENGTH
        return self.data[row, begin : begin + LENGTH], self.target[row, begin : begin + LENGTH]


def main() -> None:
    words = pathlib.Path("/usr/share/common-licenses/GPL-3").read_text().split()
    vocabulary = {word: index for index, word in enumerate(sorted(set(words)))}
    tokens = torch.tensor([vocabulary[word] for word in words])
    torch.manual_seed(1)
    loader = DataLoader(Pieces(tokens), batch_size=ROWS)
    model = RNNModel(len(vocabulary))
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    manager = accelmgr.Manager(model, loader, loss=criterion, data={"epochs": 4})
    for epoch in range(1, 5):
        total = 0.0
        model.hidden = None
        for loss, _ in manager.steps(len(loader)):
            total += loss
            clip_grad_norm_(model.parameters(), 0.25)
            optimizer.step()
            optimizer.zero_grad()
        print(f"epoch {epoch}: loss {total / len(loader):.9f}, perplexity {math.exp(total / len(loader)):.1f}")


if __name__ == "__main__":
    main()
