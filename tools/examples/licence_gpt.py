"""The model and the texts of the examples: a byte-level GPT as a plain torch.nn.Module, and the licences in Debian."""

from __future__ import annotations

import hashlib
import pathlib

import torch
from torch import nn
from torch.nn import functional

TEXTS = pathlib.Path("/usr/share/common-licenses")
VOCABULARY = 256


class Block(nn.Module):
    """Attention and MLP, each with a layer norm before it and added to the residual stream."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value, self.attention_out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        batch, length, width = values.shape
        projected = self.query_key_value(self.norm_attention(values)).view(batch, length, 3, self.heads, -1)
        query, key, value = projected.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        values = values + self.attention_out(attended.transpose(1, 2).reshape(batch, length, width))
        after: torch.Tensor = values + self.mlp(self.norm_mlp(values))
        return after


class Gpt(nn.Module):
    """A GPT in float32. `context` is the length of the longest sequence in bytes."""

    def __init__(self, layers: int = 4, width: int = 128, heads: int = 4, context: int = 128) -> None:
        super().__init__()
        self.token_embedding, self.position_embedding = nn.Embedding(VOCABULARY, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, input: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
        """`input` and `target` are int64 [batch, length]. Returns {"loss": mean loss in nats per byte}."""
        values = self.token_embedding(input) + self.position_embedding.weight[: input.shape[1]]
        logits = functional.linear(self.norm(self.blocks(values)), self.token_embedding.weight)
        return {"loss": functional.cross_entropy(logits.flatten(0, 1), target.flatten())}


def documents() -> tuple[list[pathlib.Path], list[pathlib.Path]]:
    """Files to train on, and held-out files. One in eight is held out, the same ones in all peers."""
    files = sorted({file.resolve() for file in TEXTS.iterdir() if file.is_file()})
    files.sort(key=lambda file: hashlib.sha256(file.read_bytes()).digest())
    held_out = max(1, len(files) // 8)
    return files[held_out:], files[:held_out]


class Sequences(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """`count` random sequences of `context` bytes of the texts to train on. Element i is the same on every machine."""

    def __init__(self, count: int, context: int) -> None:
        content = b"".join(file.read_bytes() for file in documents()[0])
        self.count, self.context = count, context
        self.text = torch.frombuffer(bytearray(content), dtype=torch.uint8)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        begin = int(torch.randint(len(self.text) - self.context, (1,), generator=generator))
        sequence = self.text[begin : begin + self.context + 1].long()
        return {"input": sequence[:-1], "target": sequence[1:]}


@torch.no_grad()
def held_out_loss(model: nn.Module, context: int, at_most: int = 64) -> float:
    """Mean loss in nats per byte over the first windows of the held-out texts, `at_most` of them."""
    windows = [
        torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8).long().unfold(0, context + 1, context)
        for file in documents()[1]
    ]
    rows = torch.cat(windows)[:at_most]
    was_training = model.training
    model.eval()
    loss = float(model(rows[:, :-1], rows[:, 1:])["loss"])
    model.train(was_training)
    return loss
