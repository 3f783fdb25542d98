"""Runs of inner_torture.py, each with what its seed draws."""

from __future__ import annotations

import signal

import pytest
import torch
from inner_torture import Harm, Run, raise_alarm
from test_inner import assert_same


@pytest.fixture(autouse=True)
def interrupted_on_one_thread():
    before, threads = signal.signal(signal.SIGUSR1, raise_alarm), torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("seed", [1, 2, 38, 39, 52, 58, 75, 95])
def test_no_step_is_lost_doubled_or_different(seed):
    assert_same(Run(seed, Harm(seed)).result, Run(seed, None).result)
