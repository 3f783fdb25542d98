"""Checks what a failed training prints: the cause, once, and what to do."""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys

import pytest
from conftest import BOUND_S, FAILED, USAGE
from records import lines_of

# Scripted models of a user. A Python that has torch runs this and saves each to a file.
MODELS = '''\
import torch
from torch import Tensor, nn


class WrongShape(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 8)

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return self.layer(input.float()).mean()


class Refuses(WrongShape):
    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        if int(input.max()) < 256:
            raise ValueError("no such token")
        return self.layer(input.float()).mean()


for kind in (WrongShape, Refuses):
    torch.jit.script(kind()).save(f"{kind.__name__}.pt")
'''

# Trains a scripted model on text, in elements of 32 bytes.
SCRIPTED = (
    "accelmgr train -c small.yaml --set model.kind=torchscript --set model.file={} "
    "--set data.kind=text --set data.files=text.txt --set data.sequence_length=32"
)
FRAMES = ("frame #", "Exception raised from", "Traceback of TorchScript", "TorchScript interpreter", "terminate called")


@pytest.fixture(scope="session")
def scripts(tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("scripts")
    (folder / "model.py").write_text(MODELS)
    subprocess.run([sys.executable, "-W", "ignore", "model.py"], cwd=folder, check=True, timeout=BOUND_S)
    return folder


def train_script(person, scripts, name):
    person.file("text.txt").write_text("All that is gold does not glitter. " * 200)
    return person.types(SCRIPTED.format(scripts / f"{name}.pt"))


def assert_short(ended, *parts):
    """Standard error has each of the parts once, no stack frames, and fewer than 15 lines."""
    for part in parts:
        assert ended.err.count(part) == 1, f"'{part}' in:\n{ended.err}"
    for frame in FRAMES:
        assert frame not in ended.err
    assert len(ended.err.splitlines()) < 15, ended.err


def report_of(person):
    (report,) = person.folder.glob("*error.json")
    return json.loads(report.read_text())


def test_shapes_that_do_not_fit_are_told_once_with_the_line_of_the_model(person, scripts):
    ended = train_script(person, scripts, "WrongShape")
    assert ended.code == FAILED, ended.text
    assert_short(ended, "mat1 and mat2 shapes cannot be multiplied (4x32 and 16x8)", "model.py\", line 11, in forward",
                 "return self.layer(input.float())", "forward() was given input Long [4, 32], target Long [4, 32]")
    assert re.search(
        r"accelmgr: step 1 failed: .*runner [01] \(pid \d+\) .* in phase forward of attempt 1: mat1", ended.err)
    assert "done:" not in ended.out
    assert report_of(person)["causes"][0]["phase"] == "forward"


def test_what_a_scripted_model_raises_is_told_once_with_its_line(person, scripts):
    ended = train_script(person, scripts, "Refuses")
    assert ended.code == FAILED, ended.text
    assert_short(ended, "attempt 1: ValueError: no such token", "model.py\", line 17, in forward")
    assert "step 1 failed" in ended.err


def test_a_model_or_data_that_is_not_there_is_the_error_of_the_start(person):
    ended = person.types("accelmgr train -c small.yaml --set model.kind=torchscript --set model.file=nowhere.pt")
    assert (ended.code, ended.err) == (USAGE, "accelmgr: model.file: there is no file 'nowhere.pt'\n")
    ended = person.types("accelmgr train -c small.yaml --set data.kind=text --set data.files=nowhere.txt "
                         "--set model.kind=gpt")
    assert ended.code == USAGE, ended.text
    assert_short(ended, "accelmgr: data source 'text': data.files: no such file: 'nowhere.txt' in ")
    assert person.files() == set()


def test_a_session_beyond_the_limit_of_memory_is_told_with_both_numbers_and_what_takes_less(person):
    ended = person.types("accelmgr train -c small.yaml --set memory.limit_bytes=1000000 "
                         "--set model.mlp.hidden_size=2048 --set model.mlp.hidden_layers=4")
    assert ended.code == FAILED, ended.text
    assert re.fullmatch(
        r"accelmgr: the session needs \d{8,9} bytes of shared memory, memory.limit_bytes allows 1000000; "
        r"a smaller model, fewer runners or gradients.slab_dtype=bf16 need less\n", ended.err), ended.err
    assert person.files() == set()


def test_a_runner_that_is_killed_is_told_once_with_what_to_do(person):
    ended = person.types("accelmgr train -c small.yaml --set runners.on_loss=fail "
                         "--set 'faults=rank=1 step=3 phase=backward fault=kill'")
    assert ended.code == FAILED
    assert_short(ended, "accelmgr: step 3 failed: runner_lost: runner 1 (pid ", "in phase backward of attempt 3",
                 "dmesg", "batch_size_per_device")
    assert "step 2/10" in ended.out and "step 3/10" not in ended.out
    assert report_of(person)["step"] == 3


def test_a_runner_that_crashes_is_told_once_with_its_signal(person):
    running = person.trains("accelmgr train -c small.yaml --set runners.on_loss=fail --steps 1000000", step=2)
    os.kill(runner_of(running.pid), signal.SIGSEGV)
    out, err = running.communicate(timeout=BOUND_S)
    assert running.returncode == FAILED, out + err
    assert err.count("killed by signal 11 (SEGV)") <= 2, err  # In the headline and in the line of the cause.
    assert err.count("it crashed in native code") == 1, err
    assert len(err.splitlines()) < 15, err


def runner_of(pid: int) -> int:
    """The pid of a runner among the descendants of process `pid`, found by its name."""
    below = [pid]
    for parent in below:
        for task in pathlib.Path(f"/proc/{parent}/task").iterdir():
            below += map(int, (task / "children").read_text().split())
    return next(p for p in below if pathlib.Path(f"/proc/{p}/comm").read_text().startswith("accelmgr:run"))


def test_an_exception_that_comes_again_after_every_restart_is_told_in_full_twice(person):
    """Once when it first occurs, because training may go on then, and once as the error of the step."""
    person.file("logs").mkdir()
    ended = person.types("accelmgr train -c small.yaml --log logs/l.jsonl --set runners.restarts_per_window=3 "
                         "--set runners.restart_window=600 --set runners.restart_backoff=0 "
                         "--set 'faults=rank=1 generation=any step=3 phase=forward fault=exception:melted'")
    assert ended.code == FAILED
    assert ended.err.count("melted") == 2, ended.err
    assert "3 restarts within 600 s (runners.restarts_per_window)" in ended.err
    assert "in phase forward: the same again" in ended.err
    assert "step 2/10" in ended.out
    report = json.loads(person.file("logs/accelmgr-error.json").read_text())
    *steps, last, run = lines_of(person.file("logs/l.jsonl"))
    assert (last["status"], last["counted"], last["error"]) == ("runner_lost", False, report["error"])
    assert (run["run"]["ended"], run["run"]["steps"]) == ("failed", len(steps))
    assert ended.out.splitlines()[-1].startswith("failed: ")
    assert report["error"] in ended.err and f"pid {report['causes'][-1]['pid']}" in report["error"]
    for cause in report["causes"]:
        assert [cause[key] for key in ("rank", "phase", "step", "exit", "what")] == [
            1, "forward", 3, "exit code 17", "melted"]
        assert len(cause["log"]) == 2, "the lines of this process alone"
        assert re.search(r"info \[rank 1 step 3\] melted$", cause["log"][-1])
    assert len({cause["pid"] for cause in report["causes"]}) == 3
