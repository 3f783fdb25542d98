"""Ctrl-C in the two long waits, as a terminal sends it: to all of the process group."""

import os
import signal
import time

import pytest
from gate import Gate
from programs import BOUND_S, read_until, started

PROGRAM = """\
import pathlib, sys, torch, accelmgr
from gate import Count, Gate, Told

class Waits(Count):
    def __iter__(self):
        Gate(folder / "source").pass_through()
        return super().__iter__()

folder = pathlib.Path(sys.argv[1])
model = Told(folder)
try:
    manager = accelmgr.Manager(model, Waits(), nprocs=2, runners__threads=1)
except KeyboardInterrupt:
    print("interrupted in start, nothing of", model.weight.tolist(), flush=True)
    sys.exit(3)
print("ready", flush=True)
sys.stdin.readline()
try:
    manager.step()
except KeyboardInterrupt:
    print("interrupted after", manager.statistics().steps, model.weight.grad.tolist(), flush=True)
sys.stdin.readline()
print("then", manager.step(), flush=True)
manager.stop()
"""


def proceed(process):
    process.stdin.write("\n")
    process.stdin.flush()


def interrupt(process):
    os.killpg(process.pid, signal.SIGINT)
    return time.monotonic()


def test_in_a_step_nothing_is_added_and_the_next_one_works(tmp_path):
    gate = Gate(tmp_path / "gate")
    with started("-c", PROGRAM, str(tmp_path), cwd=tmp_path) as process:
        read_until(process, "ready\n")
        gate.shut()
        proceed(process)
        with gate.held():
            begin = interrupt(process)
            assert read_until(process, "\n") == "interrupted after 0 [0.0, 0.0]\n"
            assert time.monotonic() - begin < 5
        proceed(process)
        assert read_until(process, "\n").startswith("then StepResult(ok, step 1, ")
        assert process.wait(timeout=BOUND_S) == 0
        assert process.stderr.read() == ""


def test_in_start_nothing_is_left(tmp_path):
    gate = Gate(tmp_path / "source")
    gate.shut()
    with started("-c", PROGRAM, str(tmp_path), cwd=tmp_path) as process:
        with gate.held():
            begin = interrupt(process)
            assert read_until(process, "\n") == "interrupted in start, nothing of [1.0, 2.0]\n"
            assert time.monotonic() - begin < 10
        assert process.wait(timeout=BOUND_S) == 3
        assert process.stderr.read() == ""


def test_a_second_one_that_nobody_catches_ends_the_program(tmp_path):
    gate = Gate(tmp_path / "gate")
    with started("-c", PROGRAM, str(tmp_path), cwd=tmp_path) as process:
        read_until(process, "ready\n")
        gate.shut()
        proceed(process)
        with gate.held():
            interrupt(process)
            read_until(process, "interrupted after 0")
            interrupt(process)
            assert process.wait(timeout=BOUND_S) == -signal.SIGINT
        assert process.stderr.read().splitlines()[-1] == "KeyboardInterrupt"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["KILL", "TERM"])
def test_a_host_that_is_killed_takes_all_with_it(tmp_path, number):
    with started("-c", PROGRAM, str(tmp_path), cwd=tmp_path) as process:
        read_until(process, "ready\n")
        process.send_signal(number)
        assert process.wait(timeout=BOUND_S) == -number  # The leak check waits for the rest.
