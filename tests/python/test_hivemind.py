"""Checks that hivemind peers whose gradients accelmgr computes end with the parameters of plain PyTorch."""

from __future__ import annotations

import pytest

pytest.importorskip("hivemind", reason="the optional extra accelmgr[hivemind] is not installed")
import hivemind_modes

MODES = ["default", "reuse_grad_buffers", "use_local_updates", "delay_optimizer_step"]


@pytest.mark.timing
@pytest.mark.parametrize("optimizer", hivemind_modes.OPTIMIZERS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("peers", [1, 2], ids=["one peer", "two peers"])
def test_peers_end_where_plain_torch_ends(peers: int, mode: str, optimizer: str) -> None:
    hivemind_modes.assert_equals_plain_torch(mode, optimizer, peers)


@pytest.mark.timing
@pytest.mark.parametrize("mode", [mode for mode in hivemind_modes.MODES if mode not in MODES])
def test_other_ways_to_zero_gradients_and_to_make_the_optimizer_come_to_the_same(mode: str) -> None:
    hivemind_modes.assert_equals_plain_torch(mode, "SGD", 2)
