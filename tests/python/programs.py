"""Programs of their own: started, interrupted, waited for; each with a bound, and nothing of it left after that."""

from __future__ import annotations

import contextlib
import os
import pathlib
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

BOUND_S = 60


def python_path() -> str:
    return os.pathsep.join(path for path in sys.path if path and os.path.isdir(path))


def environment(**extra: str) -> dict[str, str]:
    """ACCELMGR_: of the test alone."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("ACCELMGR_")}
    return {**own, "PYTHONPATH": python_path(), "PYTHONUNBUFFERED": "1", **extra}


@contextlib.contextmanager
def started(*arguments: str, cwd: pathlib.Path) -> Iterator[subprocess.Popen[str]]:
    """In a process group of its own; what it reads is to be written to its `stdin`."""
    process = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=cwd,
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def run(*arguments: str, cwd: pathlib.Path) -> tuple[int, str, str]:
    """Exit code, standard output, standard error."""
    with started(*arguments, cwd=cwd) as process:
        out, err = process.communicate(timeout=BOUND_S)
        return process.returncode, out, err


def read_until(process: subprocess.Popen[str], line: str) -> str:
    """What it printed up to that line."""
    assert process.stdout is not None
    text = ""
    deadline = time.monotonic() + BOUND_S
    while line not in text:
        ready, _, _ = select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))
        assert ready, f"'{line}' did not come; there is: {text}"
        data = os.read(process.stdout.fileno(), 65536).decode()
        assert data, f"it ended before '{line}'; it said: {text}; {process.stderr.read() if process.stderr else ''}"
        text += data
    return text
