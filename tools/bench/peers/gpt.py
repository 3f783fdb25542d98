"""The model, data and optimizer of configs/gpt-licenses.yaml in plain PyTorch, for gpt_train.py."""

import math

import torch
from torch import nn
from torch.nn import functional

LAYERS, WIDTH, HEADS, CONTEXT, VOCABULARY, DROPOUT = 4, 128, 4, 128, 256, 0.1
BATCH_SIZE = 32
LEARNING_RATE, BETAS, WEIGHT_DECAY, CLIP_NORM = 2e-3, (0.9, 0.95), 0.1, 1.0
WARMUP_UPDATES, FINAL_LEARNING_RATE_RATIO = 20, 0.1


class Block(nn.Module):
    """Attention and MLP, each with a layer norm before it and added to the residual stream."""

    def __init__(self):
        super().__init__()
        self.norm_attention, self.norm_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH)
        self.attention_out = nn.Linear(WIDTH, WIDTH)
        self.mlp_in, self.mlp_out = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(DROPOUT)

    def attend(self, values):
        batch, length, _ = values.shape
        query, key, value = (
            part.view(batch, length, HEADS, WIDTH // HEADS).transpose(1, 2)
            for part in self.query_key_value(values).split(WIDTH, dim=2)
        )
        attended = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, dropout_p=DROPOUT if self.training else 0.0
        )
        return self.attention_out(attended.transpose(1, 2).reshape(batch, length, WIDTH))

    def forward(self, values):
        values = values + self.drop(self.attend(self.norm_attention(values)))
        return values + self.drop(self.mlp_out(functional.gelu(self.mlp_in(self.norm_mlp(values)))))


class Gpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.token_embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.position_embedding = nn.Embedding(CONTEXT, WIDTH)
        self.drop = nn.Dropout(DROPOUT)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.initialize()

    def initialize(self):
        """Initializes as GPT-2: normal with deviation 0.02, which is smaller for projections into the residual stream,
        by the number of additions to it."""
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)
        for block in self.blocks:
            for projection in (block.attention_out, block.mlp_out):
                nn.init.normal_(projection.weight, std=0.02 / math.sqrt(2 * LAYERS))

    def forward(self, tokens, targets):
        """Mean loss in nats per byte. `tokens` and `targets` are int64 [batch, length]."""
        positions = torch.arange(tokens.shape[1])
        values = self.drop(self.token_embedding(tokens) + self.position_embedding(positions))
        for block in self.blocks:
            values = block(values)
        logits = functional.linear(self.norm(values), self.token_embedding.weight)
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def read_documents(files):
    """The bytes of each file as int64. Every file must be longer than CONTEXT."""
    documents = []
    for file in files:
        with open(file, "rb") as document:
            documents.append(torch.frombuffer(bytearray(document.read()), dtype=torch.uint8).long())
    return documents


def windows(documents, phase_of=lambda document: 0):
    """int64 [count, CONTEXT + 1]: consecutive windows of CONTEXT bytes of each document, each with the byte after it.
    The first window begins at phase_of(document)."""
    return torch.cat(
        [document[phase_of(document) :].unfold(0, CONTEXT + 1, CONTEXT) for document in documents]
    )


def training_batches(documents, seed, rank, world_size):
    """Yields this rank's share (tokens, targets) of each batch, without an end. Every epoch cuts the documents at
    different places and has a different order, the same on all ranks."""
    generator = torch.Generator().manual_seed(seed)

    def random_phase(document):
        return int(torch.randint(min(CONTEXT, len(document) - CONTEXT), (), generator=generator))

    share = BATCH_SIZE // world_size
    pending = torch.empty(0, CONTEXT + 1, dtype=torch.int64)
    while True:
        while len(pending) < BATCH_SIZE:
            epoch = windows(documents, random_phase)
            pending = torch.cat([pending, epoch[torch.randperm(len(epoch), generator=generator)]])
        batch, pending = pending[:BATCH_SIZE], pending[BATCH_SIZE:]
        rows = batch[rank * share : (rank + 1) * share]
        yield rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def make_optimizer(model):
    parameters = list(model.parameters())
    groups = [
        {
            "params": [parameter for parameter in parameters if parameter.dim() >= 2],
            "weight_decay": WEIGHT_DECAY,
        },
        {"params": [parameter for parameter in parameters if parameter.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=BETAS, fused=True)


def learning_rate(update, updates):
    """Linear warm-up, then a cosine that ends at FINAL_LEARNING_RATE_RATIO."""
    if update < WARMUP_UPDATES:
        return LEARNING_RATE * (update + 1) / WARMUP_UPDATES
    progress = (update - WARMUP_UPDATES) / max(1, updates - 1 - WARMUP_UPDATES)
    share = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return LEARNING_RATE * (FINAL_LEARNING_RATE_RATIO + (1 - FINAL_LEARNING_RATE_RATIO) * share)


@torch.no_grad()
def held_out_loss(model, elements):
    model.eval()
    total = sum(model(rows[:, :-1], rows[:, 1:]).item() * len(rows) for rows in elements.split(BATCH_SIZE))
    model.train()
    return total / len(elements)
