"""Runs the hivemind example tools/examples/run_swarm.py with a small model."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("hivemind", reason="the optional extra accelmgr[hivemind] is not installed")

ROOT = pathlib.Path(__file__).resolve().parents[2]
SWARM = ROOT / "tools" / "examples" / "run_swarm.py"
SMALL = ["--layers", "2", "--width", "32", "--context", "32", "--runners", "1", "--batch-size", "16"]
SECONDS = 400  # Time limit of a swarm; it needs an eighth of that.
FIRST_LOSS = 5.5  # ln 256: the loss while all bytes are equally likely.
TRAINED_LOSS = 3.0  # An upper bound after hundreds of updates; 2.1 to 2.5 were seen.


def swarm(target_batch_size: int, *arguments: str) -> tuple[list[dict[str, Any]], str]:
    """Runs a swarm. Returns the JSON lines of all peers, and all other lines. run_swarm.py ends all its peers."""
    command = [sys.executable, str(SWARM), f"--seconds={SECONDS}", *arguments, "--", *SMALL]
    command += ["--target-batch-size", str(target_batch_size), "--averaging-timeout", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS + 25)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    lines = done.stdout.splitlines()
    parsed = [json.loads(line) for line in lines if line.startswith("{")]
    return parsed, "\n".join(line for line in lines if not line.startswith("{"))


def of(lines: list[dict[str, Any]], event: str) -> list[dict[str, Any]]:
    return [line for line in lines if line["event"] == event]


@pytest.mark.timing
def test_the_example_trains_with_two_peers_that_average_gradients() -> None:
    lines, _ = swarm(256, "--epochs", "3")
    ends = of(lines, "end")
    assert {end["peer"] for end in ends} == {0, 1}
    assert all(end["epoch"] >= 3 and end["held_out_loss"] < FIRST_LOSS - 0.2 for end in ends), ends


@pytest.mark.timing
def test_parameters_are_averaged_though_a_peer_is_killed_and_one_joins_late() -> None:
    # With a smaller target batch an epoch would end before a peer has seen the other peers.
    lines, report = swarm(2048, "--peers", "3", "--kill", "--late", "--average", "parameters", "--epochs", "4")
    ends = of(lines, "end")
    assert {end["peer"] for end in ends} == {0, 2}, report
    assert "peer 1: killed" in report
    assert max(end["held_out_loss"] for end in ends) - min(end["held_out_loss"] for end in ends) <= 0.05
    # Peer 0 has sent its state to the late peer. Its runners must still see what it writes afterwards.
    assert all(end["held_out_loss"] < TRAINED_LOSS for end in ends), lines
    # The late peer began at the epoch of the swarm, and made further epochs with it.
    late = [line["epoch"] for line in of(lines, "epoch") if line["peer"] == 2]
    assert late[1] >= 1 and late[-1] > late[1]
