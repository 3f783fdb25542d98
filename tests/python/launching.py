"""Start method of the tests' managers, and functions that kill a process or check that it has ended."""

from __future__ import annotations

import os
import select
import signal

START_METHOD = "auto"
SERVER = "accelmgr:zygote"  # The name of the forkserver's process.


def kill(pid: int) -> None:
    """Kills a process and returns when it has ended."""
    fd = os.pidfd_open(pid)
    try:
        os.kill(pid, signal.SIGKILL)
        select.select([fd], [], [])
    finally:
        os.close(fd)


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False
