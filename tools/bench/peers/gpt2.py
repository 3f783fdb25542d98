"""GPT-2 small in plain PyTorch, with 124 million parameters, and batches of random tokens, for tools/bench/gpu. `tiny`
is the same with fewer of everything: it shows that the benchmark works, on a CPU too."""

import dataclasses

import torch
from torch import nn
from torch.nn import functional


@dataclasses.dataclass(frozen=True)
class Shape:
    layers: int
    heads: int
    width: int
    vocabulary: int
    context: int
    batch_size: int


# The shapes of GPT-2 small: https://github.com/openai/gpt-2 (hparams.json of the model 124M).
SHAPES = {
    "small": Shape(layers=12, heads=12, width=768, vocabulary=50257, context=1024, batch_size=8),
    "tiny": Shape(layers=2, heads=2, width=32, vocabulary=257, context=32, batch_size=2),
}
ELEMENTS = 64  # of a dataset, which begins again behind the last


class Block(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.heads = shape.heads
        self.norm_attention, self.norm_mlp = nn.LayerNorm(shape.width), nn.LayerNorm(shape.width)
        self.query_key_value = nn.Linear(shape.width, 3 * shape.width)
        self.attention_out = nn.Linear(shape.width, shape.width)
        self.mlp_in, self.mlp_out = nn.Linear(shape.width, 4 * shape.width), nn.Linear(4 * shape.width, shape.width)

    def attend(self, values):
        batch, length, width = values.shape
        query, key, value = (
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.query_key_value(values).split(width, dim=2)
        )
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.attention_out(attended.transpose(1, 2).reshape(batch, length, width))

    def forward(self, values):
        values = values + self.attend(self.norm_attention(values))
        return values + self.mlp_out(functional.gelu(self.mlp_in(self.norm_mlp(values)), approximate="tanh"))


class Gpt2(nn.Module):
    """Without dropout. Returns the mean loss in nats per token."""

    def __init__(self, shape):
        super().__init__()
        self.token_embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.position_embedding = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)

    def forward(self, tokens, targets):
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        values = self.token_embedding(tokens) + self.position_embedding(positions)
        for block in self.blocks:
            values = block(values)
        logits = functional.linear(self.norm(values), self.token_embedding.weight)
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def make_model(name):
    """The same parameters in every process."""
    torch.manual_seed(1)
    return Gpt2(SHAPES[name])


class Texts(torch.utils.data.Dataset):
    """Random tokens and the ones after them: elements in memory, without an end."""

    def __init__(self, name):
        shape = SHAPES[name]
        generator = torch.Generator().manual_seed(2)
        self.rows = torch.randint(shape.vocabulary, (ELEMENTS, shape.context + 1), generator=generator)

    def __getitem__(self, index):
        row = self.rows[index % ELEMENTS]
        return row[:-1].contiguous(), row[1:].contiguous()


def batches(name):
    """Batches of the elements of Texts, in their order, without an end."""
    texts, size, first = Texts(name), SHAPES[name].batch_size, 0
    while True:
        rows = [texts[first + i] for i in range(size)]
        first += size
        yield torch.stack([tokens for tokens, _ in rows]), torch.stack([targets for _, targets in rows])
