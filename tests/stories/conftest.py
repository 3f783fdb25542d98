"""Stories: a person's command, what must be printed, what must be on the disk afterwards."""

import ctypes
import dataclasses
import os
import pathlib
import shlex
import signal
import subprocess

import pytest

PROGRAM = os.environ["ACCELMGR_PROGRAM"]
DONE, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130
BOUND_S = 120  # More than any story takes on a loaded machine; reached only by one that fails.
GONE_S = 30  # Within which what was killed is gone.
PR_SET_CHILD_SUBREAPER = 36

# A model of a second: `accelmgr train -c small.yaml`.
SMALL = """\
nprocs: 2
batch_size_per_device: 4
runners: {threads: 1}
model: {kind: mlp, mlp: {input_size: 16, hidden_size: 32}}
train: {steps: 10, progress_every_s: 1.0e-6}
"""

# Orphans become children of this process: it sees what a command leaves behind.
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
    """Somebody in an empty folder, which holds `small.yaml`, with no variables of accelmgr."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        (folder / "small.yaml").write_text(SMALL)
        self._started: list[subprocess.Popen[str]] = []

    def types(self, command: str, **options: object) -> Ended:
        """Runs `accelmgr ...` to its end; options as those of begins()."""
        started = self.begins(command, **options)
        try:
            out, err = started.communicate(timeout=BOUND_S)
        except subprocess.TimeoutExpired:
            os.killpg(started.pid, signal.SIGKILL)
            raise
        return Ended(started.returncode, out or "", err or "")

    def begins(self, command: str, *, env: dict[str, str] | None = None, **options: object) -> subprocess.Popen[str]:
        """Starts a command in a process group of its own: what a shell would split, with `accelmgr` as the first word
        for the program. Options are those of Popen; output is captured unless told."""
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

    def file(self, name: str) -> pathlib.Path:
        return self.folder / name

    def files(self) -> set[str]:
        """All names in the folder, besides `small.yaml`."""
        return {entry.name for entry in self.folder.iterdir()} - {"small.yaml"}

    def leaves(self) -> None:
        """Ends what a failed story left."""
        for started in self._started:
            if started.poll() is None:
                os.killpg(started.pid, signal.SIGKILL)
                started.wait(GONE_S)


@pytest.fixture
def person(tmp_path: pathlib.Path):
    somebody = Person(tmp_path)
    yield somebody
    somebody.leaves()
