"""Checks that features of autograd give the gradients of plain PyTorch, with 1 to 3 runners and each start method."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from differential import Bundle, Shape, compare
from features import (
    PARAMETRIZATIONS,
    ChannelsLast,
    HookOnWhatIsAccumulated,
    HooksOnParameters,
    Parametrized,
    Parts,
    TiedByStorage,
    features,
)
from torch import nn

SHAPES = [
    (Shape(1, 1), "forkserver"),
    (Shape(2, 2), "spawn"),
    (Shape(3, 1), "forkserver"),
    (Shape(1, 2), "forkserver"),
    (Shape(2, 1), "fork"),
    (Shape(3, 2), "fork"),
]


@pytest.mark.parametrize(("shape", "start_method"), SHAPES, ids=str)
def test_features(shape, start_method):
    compare(Bundle(features()), shape=shape, start_method=start_method, accumulate=(True, False, True))


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(4)
    return Bundle({"feature": make()})


@pytest.mark.parametrize("start_method", ["forkserver", "fork"])
def test_hooks_on_parameters(start_method):
    compare(partial(seeded, HooksOnParameters), shape=Shape(2), start_method=start_method)


def test_a_hook_after_accumulation_sees_what_is_accumulated():
    compare(partial(seeded, HookOnWhatIsAccumulated), shape=Shape(1, 2), start_method="fork")


@pytest.mark.parametrize(("start_method", "factory"), [("forkserver", False), ("forkserver", True), ("fork", False)])
def test_weights_tied_by_storage(start_method, factory):
    compare(partial(seeded, TiedByStorage), shape=Shape(2), start_method=start_method, factory=factory)


def test_weights_that_are_parts_of_one_storage():
    compare(partial(seeded, Parts), shape=Shape(2))


def parametrized() -> nn.Module:
    torch.manual_seed(4)
    return Bundle({name: Parametrized(wrap) for name, wrap in PARAMETRIZATIONS.items()})


@pytest.mark.parametrize(
    ("shape", "start_method", "factory"),
    [(Shape(2, 2), "forkserver", True), (Shape(2), "forkserver", False), (Shape(3), "fork", False)],
    ids=str,
)
def test_parametrizations(shape, start_method, factory):
    compare(parametrized, shape=shape, start_method=start_method, factory=factory)


def test_channels_last():
    """Not exact: kernels for channels-last memory may add in a different order."""
    compare(partial(seeded, ChannelsLast), shape=Shape(2), exact=False)
