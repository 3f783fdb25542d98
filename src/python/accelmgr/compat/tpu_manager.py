"""TPUManager under its own names: a script that was written for the original runs after a change of its import alone.

    from accelmgr.compat.tpu_manager import TPUManager   # or: from accelmgr import TPUManager

    manager = TPUManager(model, dataset, nprocs=8, batch_size_per_device=4, start=True)
    loss, samples = manager.step()
    gradients = manager.get_aggregated_gradients()

It differs from the original on purpose:

- step() always returns. The end of the data, a lost runner and a value that is not finite are errors of the result.
- `samples` counts the elements that took part.
- update_model_parameters() writes all of the master's parameters or none. Runners never compute with half of an update.
- All processes end with the host at the latest.
- The processes are not forks of the host. Members of the original that need this raise, and say what to use instead.

Source: the class TPUManager of hivemind's examples (torch_xla), whose names, signatures and defaults these are.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import logging
import multiprocessing
import os
import re
import select
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from accelmgr import _native
from accelmgr.compat._event import Event
from accelmgr.compat._tpu_data import DeviceQueue, QueueDataset, SessionData, TPUDataManager
from accelmgr.compat._tpu_synchronizer import SessionSynchronizer, TPUSynchronizer, detached
from accelmgr.errors import UsageError
from accelmgr.manager import Manager

logger = logging.getLogger("accelmgr.tpu_manager")

# Lock and values are of the types that the original had. The context fork needs no resource tracker. The values have
# no locks: a process that is killed would hold them for ever.
_context = multiprocessing.get_context("fork")
_numbers = itertools.count(1)
_SLICE_S = 0.2  # A wait looks this often for changes that do not wake it.


class TPUManager(Manager):
    """A Manager with the names of the original, which was a multiprocessing.Process.

    nprocs, prefetch, batch_size_per_device, grad_accumulation_steps, seed_base and collate_fn are as in the signature
    of the original. `device="xla"` has runners compute on XLA devices, as those of the original did, and "cuda" on
    GPUs; the default is the CPU. Other options come from the environment (`ACCELMGR_STEP_TIMEOUT`), or use
    accelmgr.Manager.
    Elements are mappings (the model's keyword arguments), tuples or tensors.

    lock: update_model_parameters(), get_aggregated_gradients(), zero_grad() and step() hold it. A thread that calls one
        of them waits until a call of another thread has returned. The lock is not reentrant: a caller that holds it
        and calls one of them gets UsageError after `step_timeout` seconds.
    step_triggered: `is_set()` is true from the request of a step until runners have begun it. `set()` requests a step:
        a thread makes it, and sets `step_finished` after it.
    step_finished: set after a step, also after a failed one (then `gradients_accumulated.value` is 0); cleared when a
        step begins.
    should_load_parameters: `.value` is True from update_model_parameters() until a step was made with the parameters.
    gradients_accumulated, loss_accumulated: `.value` is the samples and the mean loss of the last step; 0 during a
        step.
    last_result: the StepResult of the last step; None before the first one.
    """

    _keeps_zeros = True

    def __init__(
        self,
        model: torch.nn.Module,
        dataset: Iterable[Any],
        *,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        nprocs: int = 8,
        prefetch: int = 16,
        batch_size_per_device: int = 1,
        grad_accumulation_steps: int = 1,
        seed_base: int = 42,
        start: bool,
        device: str | torch.device | None = None,
    ) -> None:
        super().__init__(
            model,
            dataset,
            collate_fn=collate_fn,
            nprocs=nprocs,
            prefetch=prefetch,
            batch_size_per_device=batch_size_per_device,
            grad_accumulation_steps=grad_accumulation_steps,
            seed_base=seed_base,
            device=device,
            start_method="spawn",  # `exitcode` and is_alive() ask about a child of this process.
            start=False,
        )
        self.nprocs, self.prefetch, self.seed_base = nprocs, prefetch, seed_base
        self.batch_size_per_device, self.grad_accumulation_steps = batch_size_per_device, grad_accumulation_steps
        self.name = f"TPUManager-{next(_numbers)}"
        self.lock = _context.Lock()
        self.step_triggered, self.step_finished = StepTrigger(self), Event()
        self.should_load_parameters = _context.RawValue(ctypes.c_bool, False)
        self.gradients_accumulated = _context.RawValue(ctypes.c_long, 0)
        self.loss_accumulated = _context.RawValue(ctypes.c_double, 0.0)
        self.last_result: _native.StepResult | None = None
        self._synchronizer: TPUSynchronizer = SessionSynchronizer(model, self)
        self._data_manager: TPUDataManager = SessionData(dataset, nprocs, prefetch)
        self._pid: int | None = None
        self._pidfd = -1
        self._exitcode: int | None = None
        self._patience_s = self._handle.step_timeout
        self._callers: set[int] = set()  # Threads in a call that holds the lock or waits for it.
        self._ending: int | None = None  # The exit code, if a call must end the manager when it returns.
        if start:
            self.start()

    @contextlib.contextmanager
    def _held(self, call: str) -> Iterator[None]:
        self._callers.add(threading.get_ident())
        try:
            if not self.lock.acquire(timeout=self._patience_s):
                raise UsageError(
                    f"{call}() waited {self._patience_s:g} s for the manager's lock; "
                    "do not call it while you hold the lock"
                )
            try:
                yield
            finally:
                self.lock.release()
        finally:
            self._callers.discard(threading.get_ident())
            if self._ending is not None:
                self._end(self._ending)

    # Steps and tensors

    def step(
        self,
        timeout: float | None = None,
        accumulate: bool = True,
        parameters_changed: bool = True,
        repeat: bool = False,
    ) -> _native.StepResult:
        """As Manager.step(): `loss, samples = manager.step()`. Calls of several threads wait for each other."""
        with self._held("step"):
            self.loss_accumulated.value = 0.0
            self.gradients_accumulated.value = 0
            self.step_finished.clear()
            self.step_triggered._begin()
            try:
                result = super().step(timeout, accumulate, parameters_changed, repeat)
                self._take_note(result)
                return result
            except BaseException as error:
                if hasattr(error, "step_result"):
                    self._take_note(error.step_result)
                raise
            finally:
                self.step_triggered._end()
                self.step_finished.set()

    def _take_note(self, result: _native.StepResult) -> None:
        self.last_result = result
        if result.counted:
            self.should_load_parameters.value = False
            self.loss_accumulated.value = result.loss
            self.gradients_accumulated.value = result.samples

    def update_model_parameters(self, parameters: Iterable[torch.Tensor]) -> None:
        """Replaces the master's parameters, in the order of `model.parameters()`, before the next step.

        Raises ModelError for a wrong count, shape or dtype; then nothing was written. Waits for a step of another
        thread.
        """
        values = detached(parameters)
        with self._held("update_model_parameters"):
            self._synchronizer.set_host_parameters(values)
            self.should_load_parameters.value = True

    def get_aggregated_gradients(self) -> list[torch.Tensor]:
        """The master's gradients in the order of `model.parameters()`: views, the same at every call.

        Waits for a step of another thread. Hold `lock` while you read the gradients if a step may begin meanwhile.
        """
        with self._held("get_aggregated_gradients"):
            return self._synchronizer.get_aggregated_gradients()

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Zeroes the master's gradients, in place. Waits for a step of another thread."""
        with self._held("zero_grad"):
            super().zero_grad(set_to_none)

    # A process

    def start(self) -> None:
        """As Manager.start()."""
        super().start()
        self._watch_process()

    def recover(self) -> None:
        """As Manager.recover(); `pid` is that of the new manager process."""
        super().recover()
        self._exitcode = None
        self._watch_process()

    def _watch_process(self) -> None:
        self._close_pidfd()
        self._pid = self.statistics().manager_pid
        with contextlib.suppress(ProcessLookupError):  # It has ended already; exitcode says how.
            self._pidfd = os.pidfd_open(self._pid)
            self._closing = weakref.finalize(self, os.close, self._pidfd)

    def _close_pidfd(self) -> None:
        if self._pidfd >= 0:
            self._closing()
            self._pidfd = -1

    @property
    def pid(self) -> int | None:
        """The pid of the manager process; None before start()."""
        return self._pid

    @property
    def ident(self) -> int | None:
        """As pid."""
        return self._pid

    @property
    def daemon(self) -> bool:
        """True: no process of a manager outlives the host."""
        return True

    @daemon.setter
    def daemon(self, value: bool) -> None:
        if not value:
            raise UsageError("daemon cannot be False: the manager ends with this process; join() waits for its end")

    @property
    def exitcode(self) -> int | None:
        """Exit code of the manager process: None until it ends; 0: stop(), -15: terminate(), -N: signal N killed it."""
        if self._exitcode is None and self._pid is not None:
            self._exitcode = self._ended_with()
        return self._exitcode

    def _ended_with(self) -> int | None:
        try:
            if self._pidfd < 0:
                raise ChildProcessError
            ended = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # The handle has waited for it already, and has recorded how it ended.
            causes = self.last_result.causes if self.last_result is not None else []
            found = re.search(r"(signal|exit code) (\d+)", causes[-1].exit if causes else "")
            if found is None:
                return -signal.SIGKILL
            return -int(found.group(2)) if found.group(1) == "signal" else int(found.group(2))
        if ended is None:
            return None
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status

    def is_alive(self) -> bool:
        """Whether the manager process runs."""
        return self._pid is not None and self.exitcode is None

    def join(self, timeout: float | None = None) -> None:
        """Waits until the manager process has ended, or for `timeout` seconds; UsageError before start()."""
        if self._pid is None:
            raise UsageError("join() was called on a manager that was not started")
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.exitcode is None and self._pidfd >= 0:
            left = _SLICE_S if deadline is None else min(_SLICE_S, deadline - time.monotonic())
            if left <= 0:
                return
            waiter = select.poll()
            waiter.register(self._pidfd, select.POLLIN)
            waiter.poll(left * 1000)

    def stop(self) -> None:
        """As Manager.stop(): bounded, idempotent."""
        self._end(0)

    def terminate(self) -> None:
        """As stop(), but it does not wait for a step: a step of another thread ends with ManagerLost.

        In a signal handler that interrupts step(), that step ends with ManagerLost too, and all processes have ended
        when step() returns.
        """
        if self._pid is not None:
            self._end(-signal.SIGTERM)

    def kill(self) -> None:
        """Kills manager and runners at once; returns when they have ended. In a signal handler: as terminate()."""
        if self._pid is not None:
            self._handle.kill()
            self._end(-signal.SIGKILL)

    def close(self) -> None:
        """As stop()."""
        self.stop()

    def _end(self, code: int) -> None:
        held = self.lock.acquire(block=False)
        if not held and code != 0:  # A step returns at once when the processes are killed.
            self._handle.kill()
            # A signal handler has interrupted the call that holds the lock: that call returns only after this one.
            if threading.get_ident() in self._callers:
                self._ending = code
                return
            held = self.lock.acquire(timeout=self._patience_s)
        try:
            ended = self.exitcode
            super().stop()
            if self._pid is not None and self._exitcode is None:
                self._exitcode = code if ended is None else ended
            self._close_pidfd()
            self._ending = None
        finally:
            if held:
                self.lock.release()

    # What the processes of the original ran

    def run(self) -> None:
        """The body of the original's process. Always raises UsageError: start() starts the process."""
        raise UsageError("run() is what the manager process does; call start(), which starts it")

    def runner(self, tpu_index: int) -> None:
        """The body of the original's runners. Always raises UsageError: start() starts them, and step() uses them."""
        raise UsageError(
            f"runner({tpu_index}) is what a runner process does; start() starts {self.nprocs} of them, "
            "and step() lets them compute"
        )

    def _mark_step_finished(self, loss: float) -> None:
        """Records a full step with this mean loss, and wakes the threads that wait for `step_finished`."""
        self.gradients_accumulated.value = self.batch_size_per_device * self.nprocs * self.grad_accumulation_steps
        self.loss_accumulated.value = float(loss)
        self.step_finished.set()


class StepTrigger:
    """TPUManager.step_triggered. Any thread may use it."""

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


__all__ = [
    "DeviceQueue",
    "QueueDataset",
    "StepTrigger",
    "TPUDataManager",
    "TPUManager",
    "TPUSynchronizer",
]
