"""Runs of inner_torture.py, each with what its seed draws."""

from __future__ import annotations

import pytest
from harm import Harm
from inner_torture import Run
from test_inner import assert_same

from accelmgr import _native

pytestmark = pytest.mark.usefixtures("one_thread", "alarms")


@pytest.mark.parametrize(
    "seed, start_method",
    [*((seed, "fork") for seed in (1, 2, 38, 39, 52, 58, 75, 95)), (41, "forkserver"), (43, "spawn")],
)
def test_no_step_is_lost_doubled_or_different(seed, start_method):
    assert_same(Run(seed, Harm(seed), start_method).result, Run(seed, None, "fork").result)
    _native.end_forkserver()  # The harm may have killed it: what leads to it would stay open until the next start.
