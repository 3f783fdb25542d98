"""The MLP, the data and the optimizer of all modes of mlp_step.py, from tools/bench/shapes.json."""

import json
import pathlib

import torch
from torch import nn

SHAPES = json.loads((pathlib.Path(__file__).parent.parent / "shapes.json").read_text())
RUNNERS = SHAPES["runners"]
THREADS = SHAPES["threads_per_runner"]
BATCH_SIZE = SHAPES["batch_size_per_device"]
BATCHES_IN_MEMORY = 8


def make_model(millions):
    shape = SHAPES["shapes"][millions]
    torch.manual_seed(0)
    width = shape["input_size"]
    layers = []
    for _ in range(shape["hidden_layers"]):
        layers += [nn.Linear(width, shape["hidden_size"]), nn.GELU()]
        width = shape["hidden_size"]
    model = nn.Sequential(*layers, nn.Linear(width, shape["output_size"]))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert parameters == shape["parameters"], (
        f"shapes.json says {shape['parameters']} parameters, the model has {parameters}"
    )
    return model


def make_elements(millions, seed):
    """Random elements in memory: so many that a batch is not in the cache when its turn comes again."""
    shape = SHAPES["shapes"][millions]
    generator = torch.Generator().manual_seed(seed)
    count = BATCHES_IN_MEMORY * BATCH_SIZE
    inputs = torch.randn(count, shape["input_size"], generator=generator)
    targets = torch.randint(shape["output_size"], (count,), generator=generator)
    return inputs, targets


def resident_batches(millions, seed):
    """Yields batches that are views of tensors in memory, without an end, so that data costs nothing."""
    inputs, targets = make_elements(millions, seed)
    while True:
        yield from zip(inputs.split(BATCH_SIZE), targets.split(BATCH_SIZE), strict=True)


def loss_of(model, batch):
    inputs, targets = batch
    return nn.functional.cross_entropy(model(inputs), targets)


def make_optimizer(parameters):
    return torch.optim.SGD(parameters, lr=SHAPES["learning_rate"], fused=True)
