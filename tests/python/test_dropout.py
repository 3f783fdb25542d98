"""Checks that a runner draws the same random numbers as a process seeded with seed_base + rank, bit for bit."""

from __future__ import annotations

import pytest
import torch
from differential import SEED, Shape, compare, noise, started
from torch import nn

STEPS = 5


class Dropping(nn.Module):
    """Uses every kind of dropout, and draws random numbers itself."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.channels, self.alpha, self.plain = nn.Dropout2d(0.3), nn.AlphaDropout(0.2), nn.Dropout(0.4, inplace=True)
        self.feature = nn.FeatureAlphaDropout(0.2)
        self.attention = nn.TransformerEncoderLayer(32, 4, 48, dropout=0.1, batch_first=True)
        self.recurrent = nn.LSTM(32, 32, num_layers=2, dropout=0.25, batch_first=True)
        self.slope = nn.RReLU()
        self.head = nn.Linear(32, 4)

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.convolution(noise(int(index), 2, 3, 6, 6)))
        x = self.feature(self.channels(x)).flatten(2).transpose(1, 2).repeat(1, 1, 4)
        x, _ = self.recurrent(self.attention(self.alpha(self.slope(x))))
        x = self.plain(x + 0.1 * torch.randn_like(x)) * torch.bernoulli(torch.full_like(x, 0.9))
        return self.head(x).square().mean()


def model() -> Dropping:
    torch.manual_seed(3)
    return Dropping()


@pytest.mark.parametrize(
    ("shape", "start_method"),
    [(Shape(2), "spawn"), (Shape(3, 2), "fork")],
    ids=str,
)
def test_the_mean_of_processes_that_are_seeded_alike(shape, start_method):
    compare(model(), shape=shape, start_method=start_method, accumulate=(True, False) * 2)


def test_one_runner_trains_as_a_plain_loop_that_is_seeded():
    """The plain loop is written as a user would write it without a manager."""
    ours, plain = model(), model()
    assert plain(torch.tensor(0)) != plain(torch.tensor(0)), "nothing is random"
    plain = model()
    elements = [torch.tensor(0)] * STEPS
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    losses = []
    torch.manual_seed(SEED)
    for element in elements:
        optimizer.zero_grad()
        loss = plain(element)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert len(set(losses)) == STEPS
    with started(ours, elements, Shape(), "spawn") as manager:
        optimizer = torch.optim.AdamW(ours.parameters(), lr=1e-2)
        for loss in losses:
            assert manager.step(accumulate=False).loss == loss
            optimizer.step()
        for (name, own), expected in zip(ours.named_parameters(), plain.parameters(), strict=True):
            assert torch.equal(own, expected), name
