"""The manager process as a multiprocessing.Process: its pid, its end and its exit code."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
import weakref
from collections.abc import Callable
from typing import Any

from accelmgr import _native

_SLICE_S = 0.2  # A wait looks this often for changes that do not wake it.


class ManagerProcess:
    """The present manager process; there is none before watch()."""

    def __init__(self) -> None:
        self.pid: int | None = None
        self._pidfd = -1
        self._closing: Any = None
        self._exitcode: int | None = None

    def watch(self, pid: int) -> None:
        self._close()
        self.pid, self._exitcode = pid, None
        with contextlib.suppress(ProcessLookupError):  # It has ended already; exitcode() says how.
            self._pidfd = os.pidfd_open(pid)
            self._closing = weakref.finalize(self, os.close, self._pidfd)

    def forget(self, code: int) -> None:
        """Called when the process has ended: with this code, unless another one was seen."""
        if self.pid is not None and self._exitcode is None:
            self._exitcode = code
        self._close()

    def _close(self) -> None:
        if self._pidfd >= 0:
            self._closing()
            self._pidfd = -1

    def exitcode(self, last: _native.StepResult | None) -> int | None:
        """None while it runs. last: the last step, which tells how it ended if the handle has waited for it already."""
        if self._exitcode is None and self.pid is not None:
            self._exitcode = self._ended_with(last)
        return self._exitcode

    def _ended_with(self, last: _native.StepResult | None) -> int | None:
        try:
            if self._pidfd < 0:
                raise ChildProcessError
            ended = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # The handle has waited for it already, and has recorded how it ended.
            causes = last.causes if last is not None else []
            if not causes or (causes[-1].signal == 0 and not causes[-1].exit.startswith("exit code")):
                return -signal.SIGKILL
            return -causes[-1].signal or causes[-1].exit_code
        if ended is None:
            return None
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status

    def join(self, timeout: float | None, exitcode: Callable[[], int | None]) -> None:
        """Waits until it has ended, as `exitcode` says, or for `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while exitcode() is None and self._pidfd >= 0:
            left = _SLICE_S if deadline is None else min(_SLICE_S, deadline - time.monotonic())
            if left <= 0:
                return
            waiter = select.poll()
            waiter.register(self._pidfd, select.POLLIN)
            waiter.poll(left * 1000)
