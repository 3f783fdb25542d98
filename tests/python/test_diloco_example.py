"""Holds tools/examples/diloco.py against the same algorithm in plain PyTorch."""

from __future__ import annotations

import copy
import functools
import pathlib
import re
import subprocess
import sys

import pytest
import torch
from plain_gpt import CONTEXT, EXAMPLES, SMALL, elements, held_out_loss, loss_of, small_gpt
from programs import environment, started
from services import PROGRAM

EXAMPLE = str(EXAMPLES / "diloco.py")
MACHINES, ROUNDS, INNER_STEPS, RATE = 2, 4, 4, 5e-3
OPTIONS = [*SMALL, f"--rounds={ROUNDS}", f"--inner-steps={INNER_STEPS}", f"--inner-rate={RATE}", "--runners=1"]
SECONDS = 240  # Time limit of a run; it needs a tenth of that.
ROUND = re.compile(r"rank (\d): round (\d), machines (\d), loss ([\d.]+)")
HELD_OUT = re.compile(r"rank (\d): held-out loss ([\d.]+)")
# Losses differed by up to 1e-6: hivemind rounds a mean, and AdamW magnifies that.
BOUND = 1e-4


@functools.cache
def plain() -> list[list[float]]:
    """For each machine the loss of the last step of each round, and the held-out loss."""
    outer_model = small_gpt()
    outer = torch.optim.SGD(outer_model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    models = [copy.deepcopy(outer_model) for _ in range(MACHINES)]
    inner = [torch.optim.AdamW(model.parameters(), lr=RATE) for model in models]
    losses: list[list[float]] = [[] for _ in range(MACHINES)]
    for number in range(ROUNDS):
        for rank, (model, optimizer) in enumerate(zip(models, inner, strict=True)):
            model.load_state_dict(outer_model.state_dict())
            for step in range(number * INNER_STEPS, (number + 1) * INNER_STEPS):
                optimizer.zero_grad()
                loss = loss_of(model, elements(step, rank, MACHINES))
                loss.backward()
                optimizer.step()
            losses[rank].append(loss.item())
        for before, *after in zip(outer_model.parameters(), *(model.parameters() for model in models), strict=True):
            before.grad = sum(before.detach() - parameter.detach() for parameter in after) / MACHINES
        outer.step()
    return [[*found, held_out_loss(outer_model, CONTEXT)] for found in losses]


def assert_is_plain(output: str) -> None:
    for rank, expected in enumerate(plain()):
        rounds = [match for match in ROUND.findall(output) if match[0] == str(rank)]
        assert [(number, machines) for _, number, machines, _ in rounds] == [
            (str(number + 1), str(MACHINES)) for number in range(ROUNDS)
        ], output
        losses = [float(loss) for *_, loss in rounds]
        losses += [float(loss) for number, loss in HELD_OUT.findall(output) if number == str(rank)]
        assert losses == pytest.approx(expected, abs=BOUND), output
    assert expected[0] - expected[-1] > 1  # It has trained.


def test_over_torch_distributed_losses_are_those_of_plain_torch(tmp_path: pathlib.Path) -> None:
    launch = [str(PROGRAM), "spawn", "--no-python", "--nprocs=2", "--no-prefix", "--", sys.executable]
    done = subprocess.run(
        [*launch, EXAMPLE, *OPTIONS], cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert_is_plain(done.stdout)


def test_over_hivemind_losses_are_those_of_plain_torch(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("hivemind", reason="the optional extra accelmgr[hivemind] is not installed")
    options = [*OPTIONS, f"--peers={MACHINES}", f"--timeout={SECONDS}"]
    with started(EXAMPLE, *options, "--peer=0", cwd=tmp_path) as first:
        assert first.stdout is not None
        addresses = first.stdout.readline().split()
        with started(EXAMPLE, *options, "--peer=1", "--initial-peers", *addresses, cwd=tmp_path) as second:
            output, errors = second.communicate(timeout=SECONDS)
            assert second.returncode == 0, errors
        more, errors = first.communicate(timeout=SECONDS)
        assert first.returncode == 0, errors
    assert_is_plain(output + more)


def test_a_peer_without_others_goes_on_alone(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("hivemind", reason="the optional extra accelmgr[hivemind] is not installed")
    with started(EXAMPLE, *OPTIONS, "--rounds=1", "--peers=2", "--timeout=3", cwd=tmp_path) as peer:
        output, errors = peer.communicate(timeout=SECONDS)
    assert peer.returncode == 0, errors
    assert "rank 0: alone in this round" in output and "rank 0: round 1, machines 1" in output
