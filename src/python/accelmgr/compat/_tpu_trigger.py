"""Events of a TPUManager: step_finished, and step_triggered, which requests steps."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
import weakref
from typing import TYPE_CHECKING, NoReturn

from accelmgr.errors import UsageError

if TYPE_CHECKING:
    from accelmgr.compat.tpu_manager import TPUManager

logger = logging.getLogger("accelmgr.tpu_manager")


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


class StepTrigger:
    """Any thread may use it."""

    def __init__(self, manager: TPUManager) -> None:
        self._manager: TPUManager = weakref.proxy(manager)  # A reference would keep the manager alive.
        self._asked = threading.Condition()
        self._pending = False  # A step is requested, and step() has not begun.
        self._after: int | None = None  # The last attempt before the step that is under way.

    def set(self) -> None:
        """Requests a step, which a new thread makes; ignored while one is requested. See `last_result` for its end."""
        with self._asked:
            if self._pending:
                return
            self._pending = True
            self._manager.step_finished.clear()
            self._asked.notify_all()
        threading.Thread(target=self._step, name=f"{self._manager.name} step", daemon=True).start()

    def _step(self) -> None:
        try:
            result = self._manager.step()
        except Exception:
            logger.exception("the step that step_triggered.set() requested failed")
            with self._asked:
                self._pending = False
            self._manager.step_finished.set()
            return
        if not result.ok:
            logger.error("the step that step_triggered.set() requested failed: %s: %s", result.status, result.error)

    def is_set(self) -> bool:
        """True if a step is requested that no runner has begun."""
        with self._asked:
            return self._pending or (self._after is not None and not self._begun(self._after))

    def _begun(self, after: int) -> bool:
        return any(runner.attempt > after for runner in self._manager.statistics().runners)

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until a step is requested, or for `timeout` seconds. Returns True if one was requested."""
        with self._asked:
            return self._asked.wait_for(lambda: self._pending or self._after is not None, timeout)

    def clear(self) -> None:
        """Does nothing: a requested step is always made. The trigger clears when runners begin the step."""

    def _begin(self) -> None:
        with self._asked:
            self._pending = False
            last = self._manager.last_result
            self._after = last.attempt if last is not None else 0
            self._asked.notify_all()

    def _end(self) -> None:
        with self._asked:
            self._after = None
