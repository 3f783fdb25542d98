"""Checks every module of torch's own tests, with the inputs of these tests, against plain autograd."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from differential import Bundle, Case, Shape, bundle_of, compare, spread
from torch import nn
from torch.utils._pytree import tree_leaves

pytest.importorskip("expecttest", reason="torch.testing's own tests need expecttest")
from torch.testing._internal.common_modules import ModuleInfo, module_db

INPUTS = 4  # Inputs taken of each module; torch has up to 105 of one.


def tensors_of(one: Any) -> list[torch.Tensor]:
    leaves = tree_leaves((one.forward_input.args, one.forward_input.kwargs))
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def inputs_of(info: ModuleInfo) -> list[Any]:
    torch.manual_seed(0)
    made = info.module_inputs_func(info, device="cpu", dtype=torch.float32, requires_grad=True, training=True)
    # Leaves out inputs with NaN: some are logarithms of negative numbers.
    return [one for one in made if one.forward_input and not any(leaf.isnan().any() for leaf in tensors_of(one))]


def case_of(info: ModuleInfo, one: Any, repeat: int = 1) -> Case:
    torch.manual_seed(1)
    module = info.module_cls(*one.constructor_input.args, **one.constructor_input.kwargs)
    if info.is_lazy:
        module(*one.forward_input.args, **one.forward_input.kwargs)
    module = module.to(torch.float32).train()  # Some buffers have the default dtype of torch's tests.
    return Case(module, one.forward_input.args, one.forward_input.kwargs)


def cases() -> Iterator[tuple[str, Case]]:
    for info in module_db:
        for number, one in enumerate(spread(inputs_of(info), INPUTS)):
            yield f"{info.formatted_name}_{number}", case_of(info, one)


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    made, left_out = bundle_of(cases())
    print(f"{len(made.cases)} cases with {len(list(made.parameters()))} parameters", *left_out, sep="\n")
    return made


@pytest.mark.parametrize(
    ("shape", "start_method"),
    [(Shape(), "spawn"), (Shape(runners=2, accumulation=2), "forkserver"), (Shape(runners=3), "fork")],
    ids=str,
)
def test_every_module_of_torch(bundle, shape, start_method):
    accumulate = (True, True) if shape == Shape() else (False,)
    compare(bundle, shape=shape, start_method=start_method, accumulate=accumulate)


def test_nearly_all_modules_take_part(bundle):
    missing = {info.formatted_name for info in module_db} - {name.rpartition("_")[0] for name in bundle.cases}
    assert not missing and len(bundle.cases) >= 320, missing


# Large tensors: a copy of more than 1 MiB goes past the caches; one of more than 64 KiB gets memory of its own.

KIB = 2**10 // 4  # In elements of 4 bytes, as MIB.
MIB = 2**20 // 4


def varied(*shape: int) -> torch.Tensor:
    return torch.randn(shape, requires_grad=True)


def wide_parameters() -> Iterator[tuple[str, nn.Module]]:
    """Modules with parameters, some above 64 KiB, some above 1 MiB. Gradients that one node makes have one size."""
    torch.manual_seed(2)
    made: list[tuple[nn.Module, tuple[Any, ...]]] = [
        (nn.Linear(512, 520), (varied(3, 512),)),
        (nn.Linear(128, 130), (varied(3, 128),)),
        (nn.Bilinear(64, 66, 64), (varied(2, 64), varied(2, 66))),
        (nn.Embedding(4100, 64), (torch.arange(0, 4100, 7),)),
        (nn.Embedding(4100, 64, scale_grad_by_freq=True, padding_idx=1), (torch.arange(50) % 9,)),
        (nn.EmbeddingBag(300, 64, mode="max"), (torch.arange(48).reshape(6, 8) * 5,)),
        (nn.Conv1d(256, 256, 5), (varied(1, 256, 8),)),
        (nn.Conv2d(176, 180, 3, padding=1), (varied(1, 176, 4, 4),)),
        (nn.Conv2d(64, 64, 3, groups=2), (varied(1, 64, 5, 5),)),
        (nn.Conv3d(32, 36, 3), (varied(1, 32, 3, 4, 4),)),
        (nn.ConvTranspose1d(256, 256, 5), (varied(1, 256, 4),)),
        (nn.ConvTranspose2d(96, 98, 3), (varied(1, 96, 3, 3),)),
        (nn.ConvTranspose3d(32, 36, 3), (varied(1, 32, 2, 2, 2),)),
        (nn.BatchNorm1d(17_000), (varied(3, 17_000),)),
        (nn.BatchNorm2d(17_000), (varied(1, 17_000, 2, 2),)),
        (nn.BatchNorm3d(17_000), (varied(1, 17_000, 1, 2, 2),)),
        (nn.InstanceNorm1d(17_000, affine=True), (varied(1, 17_000, 3),)),
        (nn.GroupNorm(4, 17_000), (varied(2, 17_000, 2),)),
        (nn.LayerNorm(MIB + 64), (varied(2, MIB + 64),)),
        (nn.LayerNorm((130, 130)), (varied(2, 130, 130),)),
        (nn.RMSNorm(MIB + 64), (varied(1, MIB + 64),)),
        (nn.PReLU(17_000), (varied(2, 17_000),)),
        (nn.RNNCell(520, 520), (varied(2, 520), varied(2, 520))),
        (nn.GRUCell(300, 300), (varied(2, 300), varied(2, 300))),
        (nn.LSTMCell(260, 260), (varied(2, 260), (varied(2, 260), varied(2, 260)))),
        (nn.RNN(520, 520, bidirectional=True), (varied(3, 2, 520),)),
        (nn.GRU(300, 300, num_layers=2, dropout=0.1), (varied(3, 2, 300),)),
        (nn.LSTM(128, 128), (varied(3, 2, 128),)),
        (nn.LSTM(260, 260, num_layers=2, batch_first=True), (varied(2, 3, 260),)),
        (nn.LSTM(128, 128, proj_size=64), (varied(3, 2, 128),)),
        (nn.MultiheadAttention(304, 4), (varied(3, 2, 304), varied(4, 2, 304), varied(4, 2, 304))),
        (nn.MultiheadAttention(512, 4, vdim=512, bias=False), (varied(2, 512), varied(3, 512), varied(3, 512))),
        (nn.TransformerEncoderLayer(256, 4, 1030), (varied(3, 2, 256),)),
        (nn.TransformerEncoder(nn.TransformerEncoderLayer(128, 2, 160, 0.0), 2), (varied(3, 2, 128),)),
        (nn.TransformerDecoderLayer(304, 2, 864), (varied(3, 2, 304), varied(2, 2, 304))),
        (nn.Transformer(128, 2, 1, 1, 160), (varied(3, 2, 128), varied(2, 2, 128))),
    ]
    for number, (module, args) in enumerate(made):
        yield f"{type(module).__name__}_{number}", Case(module, args, {})


def test_large_ones():
    bundle, left_out = bundle_of(wide_parameters())
    print(f"{len(bundle.cases)} cases", *left_out, sep="\n")
    sizes = [parameter.numel() for parameter in bundle.parameters()]
    assert len(bundle.cases) >= 36, left_out
    assert sum(64 * KIB < size <= MIB for size in sizes) >= 40
    assert sum(size > MIB for size in sizes) >= 15
    compare(bundle, shape=Shape(runners=2, accumulation=2), accumulate=(True, True))
