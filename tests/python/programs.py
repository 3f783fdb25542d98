"""Runs Python programs in processes of their own. Every wait has a limit, and the whole process group is killed."""

from __future__ import annotations

import contextlib
import os
import pathlib
import random
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

BOUND_S = 240


def free_port() -> int:
    """A port of this node that no process uses.

    It is below 32768, where the ports begin that the kernel chooses itself. So no concurrent test is given this port,
    and a client that connects before a server listens cannot connect to itself.
    """
    for port in random.sample(range(16384, 32768), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError("100 ports from 16384 to 32767 are in use")


def python_path() -> str:
    return os.pathsep.join(path for path in sys.path if path and os.path.isdir(path))


def environment(**extra: str) -> dict[str, str]:
    """The environment of a program. Its only ACCELMGR_ variables are those that the test passes as `extra`."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("ACCELMGR_")}
    own["PYTHONWARNINGS"] = "ignore:You are using `torch.load`:FutureWarning"  # torch 2.4 calls it itself.
    return {**own, "PYTHONPATH": python_path(), "PYTHONUNBUFFERED": "1", **extra}


@contextlib.contextmanager
def started(*arguments: str, cwd: pathlib.Path, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """Starts Python in a process group of its own, with pipes as its streams. Kills the group at the end."""
    process = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=cwd,
        env=environment(**variables),
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
    """Runs Python to its end. Returns exit code, standard output and standard error."""
    with started(*arguments, cwd=cwd) as process:
        out, err = process.communicate(timeout=BOUND_S)
        return process.returncode, out, err


def run_script(text: str, *arguments: str, cwd: pathlib.Path) -> tuple[int, str, str]:
    """The same of a file with this text."""
    (cwd / "script.py").write_text(text)
    return run("script.py", *arguments, cwd=cwd)


def read_until(process: subprocess.Popen[str], line: str) -> str:
    """Reads standard output until `line` is in it, and returns all that was read."""
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
