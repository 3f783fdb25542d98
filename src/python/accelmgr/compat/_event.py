"""The event of a TPUManager."""

from __future__ import annotations

import contextlib
import os
import select
import weakref
from typing import NoReturn

from accelmgr.errors import UsageError


class Event:
    """multiprocessing.Event of this process and those forked from it, any of which may be killed while it waits.

    In the standard library's, set() waits for each process that it wakes.
    """

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        weakref.finalize(self, os.close, self._fd).atexit = False  # A daemon thread may set it until the very end.

    def is_set(self) -> bool:
        return self.wait(0)

    def set(self) -> None:
        os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):  # It is not set.
            os.eventfd_read(self._fd)

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until it is set, or for `timeout` seconds; whether it is."""
        waiter = select.poll()
        waiter.register(self._fd, select.POLLIN)
        return bool(waiter.poll(None if timeout is None else max(0.0, timeout * 1000)))

    def __reduce__(self) -> NoReturn:
        raise UsageError("this event gets into other processes by fork() alone")
