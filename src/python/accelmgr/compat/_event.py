"""The event of a TPUManager."""

from __future__ import annotations

import contextlib
import os
import select
import weakref
from typing import NoReturn

from accelmgr.errors import UsageError


class Event:
    """An event as multiprocessing.Event, for this process and its forks. A process may be killed while it waits.

    The standard library's event does not allow that: its set() waits for each process that it wakes.
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
        """Waits until the event is set, or for `timeout` seconds. Returns True if it is set."""
        waiter = select.poll()
        waiter.register(self._fd, select.POLLIN)
        return bool(waiter.poll(None if timeout is None else max(0.0, timeout * 1000)))

    def __reduce__(self) -> NoReturn:
        raise UsageError("this event can be passed to other processes only by fork()")
