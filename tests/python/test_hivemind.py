"""Checks that hivemind peers whose gradients accelmgr computes end with the parameters of plain PyTorch."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import subprocess
import sys

import pytest
import torch

pytest.importorskip("hivemind", reason="the optional extra accelmgr[hivemind] is not installed")
import hivemind_modes
from services import Service

import accelmgr

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


@pytest.mark.timing
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mode", ["not offloaded", "use_local_updates"])
def test_parameters_of_16_bits_end_where_those_of_plain_torch_end(mode: str, dtype: torch.dtype) -> None:
    hivemind_modes.assert_equals_plain_torch(mode, "SGD", 2, dtype)


HOST = """
import os, signal, sys
import hivemind, torch
import accelmgr

manager = accelmgr.attach(sys.argv[1], name="peer")
own = list(manager.parameters())
copy_ = torch.Tensor.copy_

def dies(self, *args, **kwargs):
    if any(self is parameter for parameter in own):
        os.kill(os.getpid(), signal.SIGKILL)
    return copy_(self, *args, **kwargs)

optimizer = hivemind.Optimizer(
    dht=hivemind.DHT(start=True), run_id="killed", params=own, batch_size_per_step=8, target_batch_size=8,
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1), offload_optimizer=True, verbose=False,
)
torch.Tensor.copy_ = dies
for _ in range(20):
    manager.step().raise_for_status()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.timing
def test_what_hivemind_copies_into_the_parameters_of_a_service_is_marked(tmp_path: pathlib.Path) -> None:
    """Its optimizer works on copies, so that no hook of torch sees the update."""
    service = Service(tmp_path)
    host = subprocess.Popen([sys.executable, "-c", HOST, os.fspath(service.socket)], start_new_session=True)
    try:
        assert host.wait(120) == -signal.SIGKILL
        with accelmgr.attach(service.socket) as manager:
            assert "(peer) ended while it wrote parameters" in manager.unfinished
            assert manager.left_gradients == "applied"
    finally:
        with contextlib.suppress(ProcessLookupError):  # All have ended.
            os.killpg(host.pid, signal.SIGKILL)  # With hivemind's own processes.
        service.end()
