"""Fixtures of stories: tests that type a command as a person would, then check what it printed and left on the disk."""

import ctypes
import dataclasses
import os
import pathlib
import shlex
import signal
import socket
import subprocess

import pytest

PROGRAM = os.environ["ACCELMGR_PROGRAM"]
DONE, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130
BOUND_S = 120  # Time limit of a command: more than any takes on a loaded machine.
GONE_S = 30  # Time limit for a killed process to end.
PR_SET_CHILD_SUBREAPER = 36

# The configuration of `accelmgr train -c small.yaml`: a model that trains in a second.
SMALL = """\
nprocs: 2
batch_size_per_device: 4
runners: {threads: 1}
model: {kind: mlp, mlp: {input_size: 16, hidden_size: 32}}
train: {steps: 10, progress_every_s: 1.0e-6}
"""

# Orphans become children of this process, so that it sees which processes a command leaves behind.
if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1) != 0:
    raise OSError(ctypes.get_errno(), "prctl")


@dataclasses.dataclass
class Ended:
    """How a command ended: its exit code (or minus the signal), and what it printed."""

    code: int
    out: str
    err: str

    @property
    def text(self) -> str:
        return self.out + self.err


class Person:
    """Runs commands in a folder that holds only `small.yaml`, without ACCELMGR_ environment variables."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        (folder / "small.yaml").write_text(SMALL)
        self._started: list[subprocess.Popen[str]] = []
        self._held: list[socket.socket] = []

    def types(self, command: str, **options: object) -> Ended:
        """Runs a command to its end. Options are those of begins()."""
        started = self.begins(command, **options)
        try:
            out, err = started.communicate(timeout=BOUND_S)
        except subprocess.TimeoutExpired:
            os.killpg(started.pid, signal.SIGKILL)
            raise
        return Ended(started.returncode, out or "", err or "")

    def begins(self, command: str, *, env: dict[str, str] | None = None, **options: object) -> subprocess.Popen[str]:
        """Starts a command in a process group of its own.

        The command is split into words as a shell does; a first word `accelmgr` means the program under test. Options
        are those of Popen. Output is captured unless an option redirects it.
        """
        words = shlex.split(command)
        if words[0] == "accelmgr":
            words[0] = PROGRAM
        own = {name: value for name, value in os.environ.items() if not name.startswith("ACCELMGR_")}
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        started = subprocess.Popen(
            words, cwd=self.folder, env=own | (env or {}), text=True, errors="replace", start_new_session=True,
            **(streams | options),
        )
        self._started.append(started)
        return started

    def trains(self, command: str, step: int = 1) -> subprocess.Popen[str]:
        """Starts a training, and returns when it has made the step."""
        run = self.begins(command)
        assert run.stdout is not None
        for line in run.stdout:
            if line.startswith(f"step {step}/"):
                return run
        raise AssertionError(run.communicate())

    def file(self, name: str) -> pathlib.Path:
        return self.folder / name

    def files(self) -> set[str]:
        """All names in the folder except `small.yaml`."""
        return {entry.name for entry in self.folder.iterdir()} - {"small.yaml"}

    def reserved_port(self) -> int:
        """A port of this node that no other process gets until the story ends. A program that sets SO_REUSEADDR may
        listen there."""
        held = socket.socket()
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        self._held.append(held)
        return int(held.getsockname()[1])

    def leaves(self) -> None:
        """Kills the commands that a failed story left running."""
        for held in self._held:
            held.close()
        for started in self._started:
            if started.poll() is None:
                os.killpg(started.pid, signal.SIGKILL)
                started.wait(GONE_S)


@pytest.fixture
def person(tmp_path: pathlib.Path):
    somebody = Person(tmp_path)
    yield somebody
    somebody.leaves()
