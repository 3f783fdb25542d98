# Runs in: the host.
"""The state of a manager in words."""

from __future__ import annotations

from accelmgr import _native


def _has_ended(pid: int) -> bool:
    """True if process `pid`, a child of this one, has ended. It may be a zombie that is still to be waited for."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def text_of(handle: _native.Handle, stopped: bool) -> str:
    if not handle.started:
        return "not started"
    statistics = handle.statistics()
    if stopped:
        return f"stopped: step {statistics.steps}"
    if _has_ended(statistics.manager_pid):
        return f"lost: its manager process is gone, step {statistics.steps}"
    count = len(statistics.runners)
    return f"running: {count} runner{'s' if count != 1 else ''}, step {statistics.steps}"
