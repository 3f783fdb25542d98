"""Runs tools/examples/volunteer.py as two machines do, one of which is killed and comes back."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import signal
import subprocess

from plain_gpt import EXAMPLES, SMALL
from programs import read_until, started

EXAMPLE = str(EXAMPLES / "volunteer.py")
OPTIONS = [*SMALL, "--runners=1", "--every=10", "--rounds=1000000"]
ROUND = re.compile(r"round (\d+), (\d+) peers, loss [\d.]+, digest (\w+)")


def test_machines_make_the_same_rounds_and_one_comes_back(tmp_path: pathlib.Path) -> None:
    swarm = f"run@{tmp_path}/swarm"

    def peer() -> contextlib.AbstractContextManager[subprocess.Popen[str]]:
        return started(EXAMPLE, swarm, *OPTIONS, cwd=tmp_path, OMP_NUM_THREADS="1")

    with peer() as first, peer() as other:
        with peer() as third:
            printed = read_until(first, " 3 peers")
            os.killpg(third.pid, signal.SIGKILL)
            printed += read_until(first, " 2 peers")
        with peer() as third:
            back = read_until(third, " 3 peers")
            printed += read_until(first, " 3 peers")
            os.killpg(third.pid, signal.SIGINT)
            third.communicate(timeout=60)
        printed += read_until(first, " 2 peers")
        os.killpg(other.pid, signal.SIGINT)
        seen = other.communicate(timeout=60)[0]
        os.killpg(first.pid, signal.SIGINT)
        printed += first.communicate(timeout=60)[0]
    rounds = {number: digest for number, _, digest in ROUND.findall(printed)}
    for text in (seen, back):
        others = {number: digest for number, _, digest in ROUND.findall(text)}
        both = rounds.keys() & others.keys()
        assert both and all(rounds[number] == others[number] for number in both)


def test_a_swarm_that_has_ended_goes_on(tmp_path: pathlib.Path) -> None:
    options = [*SMALL, "--runners=1", "--every=10", f"--state={tmp_path}/state.pt"]
    printed = []
    for run, rounds in (("first", 3), ("second", 5)):
        arguments = [f"{run}@{tmp_path}/swarm", *options, f"--rounds={rounds}"]
        with started(EXAMPLE, *arguments, cwd=tmp_path, OMP_NUM_THREADS="1") as one:
            with started(EXAMPLE, *arguments, cwd=tmp_path, OMP_NUM_THREADS="1"):
                printed.append(one.communicate(timeout=120)[0])
    assert [ROUND.findall(text)[-1][0] for text in printed] == ["3", "5"]
    assert ROUND.findall(printed[1])[0][0] == "4"
