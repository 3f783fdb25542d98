# Runs in: the host.
"""Inner steps that are made while the host does something else: by a thread of it, or by a service."""

from __future__ import annotations

import _thread
import asyncio
import atexit
import contextvars
import io
import os
import select
import threading
import weakref
from collections.abc import Callable, Generator, Iterator
from typing import Any

from accelmgr import _native
from accelmgr._process import thread_locals, torch_settings
from accelmgr.errors import UsageError

END = object()

_all: weakref.WeakSet[PendingSteps] = weakref.WeakSet()


class PendingSteps:
    """Steps that Manager.begin_steps() has begun: `result()`, `await`, or poll/select/asyncio on it as on a file.

    Those of a service go on when this process ends or detaches: Manager.pending_steps of the next host has them.

    Any thread may call all methods; in a forked child those that wait raise UsageError. While the steps are under way
    the manager takes no calls that step, write or change the session.
    """

    def __init__(
        self, steps: Iterator[_native.StepResult | None], end_elsewhere: Callable[[], None] | None = None
    ) -> None:
        """steps: makes a step each time that it is asked for its next result.

        end_elsewhere: ends steps that are made elsewhere. `steps` then gives news of them; None is no news.
        """
        self._steps = steps  # Until the thread has it.
        self._end_elsewhere = end_elsewhere
        self._results: list[_native.StepResult] = []
        self._error: BaseException | None = None
        self._is_cancelled = self._is_over = False
        self._thread = 0  # Its ident, when it has begun.
        self._owner = os.getpid()
        # No signal handler raises inside next(), so the descriptor is never left open.
        file = next(map(io.FileIO, map(os.eventfd, [0]), ["r+"]))
        self._fd = file.fileno()
        weakref.finalize(self, file.close).atexit = False  # A thread may be in a step then.
        _all.add(self)

    def begin(self) -> None:
        """For Manager. What the calling thread has set holds for the steps, and for processes that they fork."""
        thread_locals.note()
        context, settings = contextvars.copy_context(), torch_settings.current()
        # Not threading.Thread: it would stay for ever in a list of that module if a signal handler raised in start().
        _thread.start_new_thread(context.run, (self._run, settings))

    def _run(self, settings: torch_settings.Values) -> None:
        self._thread = threading.get_ident()  # First: a cancel() that does not see this is seen below.
        try:
            with torch_settings.held(settings), thread_locals.held():
                steps, self._steps = self._steps, iter(())
                while not self._is_cancelled:
                    if (result := next(steps, END)) is END:
                        break
                    if result is not None:
                        self._results.append(result)  # type: ignore[arg-type]
                del steps  # It holds the manager.
        except BaseException as error:
            self._error = error
        self._is_over = True
        os.eventfd_write(self._fd, 1)

    def is_elsewhere(self) -> bool:
        """For Manager: whether the steps are under way, and the calling thread is not the one that makes them."""
        return not self.done() and threading.get_ident() != self._thread

    def done(self) -> bool:
        """Whether the steps are over: all are made, one has failed, the data has ended, or they were cancelled."""
        return self._is_over or (self._is_cancelled and not self._thread)

    def fileno(self) -> int:
        """A descriptor that is readable when the steps are over, and stays so. It is closed with this object.

        Do not read from it, and do not close it.
        """
        return self._fd

    def results(self) -> list[_native.StepResult]:
        """The results of the steps that were made so far. Does not block."""
        return list(self._results)

    def result(self, timeout: float | None = None) -> list[_native.StepResult]:
        """Blocks until the steps are over, and returns the results of all that were made.

        There are fewer than were asked for if the data has ended, or after cancel(). Parameters and the optimizer's
        state of this process are up to date then, unless cancel() has ended the steps.

        Raises TimeoutError if they are not over after `timeout` seconds, or else what the steps have raised, which
        steps() would raise. After a TimeoutError and after Ctrl-C the steps go on.
        """
        self._wait("result", timeout)
        if self._error is not None:
            raise self._error
        return self.results()

    def cancel(self) -> None:
        """Ends the steps before the next one, or before their last sync(). What was made counts.

        Raises SessionError when a service does not answer.

        Blocks until the step that is under way is over, which its timeout bounds; after Ctrl-C the steps end all the
        same. Does not sync: Manager.sync() brings the parameters of this process up to date. Does nothing if the steps
        are over, and raises nothing of what they have raised.
        """
        if self._end_elsewhere is None:
            self.leave()
        elif not self.done():
            self._end_elsewhere()
            self._wait("cancel", None)

    def leave(self) -> None:
        """For Manager. As cancel(), but steps that are made elsewhere go on."""
        self._is_cancelled = True
        if self._thread:
            self._wait("cancel", None)
        else:
            self._steps = iter(())
            self._is_over = True  # The thread may begin now, and finds nothing to do.
            os.eventfd_write(self._fd, 1)

    def _wait(self, call: str, timeout: float | None) -> None:
        if os.getpid() != self._owner:
            raise UsageError(f"{call}() in a forked child; the steps are made in process {self._owner}")
        # A lock of threading would not do: a signal handler that raises in its acquire() may leave it taken.
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        if not poll.poll(None if timeout is None else max(timeout, 0.0) * 1e3):
            made = len(self._results)
            raise TimeoutError(f"after {timeout:g} s the steps are not over; {made} are made, and the others go on")

    async def _awaited(self) -> list[_native.StepResult]:
        loop = asyncio.get_running_loop()
        over = loop.create_future()

        def wake() -> None:
            if not over.done():
                over.set_result(None)

        fd = os.dup(self._fd)  # A loop has one reader for each descriptor, and others may wait, too.
        try:
            loop.add_reader(fd, wake)
            await over
        finally:
            loop.remove_reader(fd)
            os.close(fd)
        return self.result()

    def __await__(self) -> Generator[Any, None, list[_native.StepResult]]:
        """As result(), without a timeout, in asyncio. If the waiting task is cancelled, the steps go on."""
        return self._awaited().__await__()


@atexit.register
def _cancel_all() -> None:
    """A thread that is in a step must not meet an interpreter that ends."""
    for pending in list(_all):
        if pending._owner == os.getpid() and not pending.done():
            pending.leave()
