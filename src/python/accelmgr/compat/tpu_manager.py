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

import ctypes
import itertools
import multiprocessing
import signal
import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch

from accelmgr import _native
from accelmgr._host.driver import carry
from accelmgr.compat._tpu_data import DeviceQueue, QueueDataset, SessionData, TPUDataManager
from accelmgr.compat._tpu_process import ManagerProcess
from accelmgr.compat._tpu_synchronizer import SessionSynchronizer, TPUSynchronizer, detached
from accelmgr.compat._tpu_trigger import Event, StepTrigger
from accelmgr.errors import UsageError
from accelmgr.manager import Manager

# Lock and values are of the types that the original had. The context fork needs no resource tracker. The values have
# no locks: a process that is killed would hold them for ever.
_context = multiprocessing.get_context("fork")
_numbers = itertools.count(1)


class _Held:
    """A call of this thread that holds the manager's lock, and releases it wherever a signal handler raises."""

    def __init__(self, manager: TPUManager, call: str) -> None:
        self._manager = manager
        self._call = call
        self._is_of_caller = False

    def _is_mine(self) -> bool:
        lock: Any = self._manager.lock
        return bool(lock._semlock._is_mine())

    def __enter__(self) -> None:
        manager, thread = self._manager, threading.get_ident()
        manager._callers.add(thread)
        kept = manager._holder == thread  # A handler raised when the last call was about to release it.
        self._is_of_caller = not kept and self._is_mine()
        try:
            if not kept and not manager.lock.acquire(timeout=manager._patience_s):
                raise UsageError(
                    f"{self._call}() waited {manager._patience_s:g} s for the manager's lock; "
                    "do not call it while you hold the lock"
                )
            manager._holder = thread
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *raised: object) -> None:
        manager = self._manager
        if not self._is_of_caller and self._is_mine():
            manager._holder = None
            manager.lock.release()
        manager._callers.discard(threading.get_ident())
        if manager._ending is not None:
            manager._end(manager._ending)


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
        self._process = ManagerProcess()
        self._patience_s = self._handle.step_timeout
        self._holder: int | None = None  # The thread whose call holds the lock.
        self._callers: set[int] = set()  # Threads in a call that holds the lock or waits for it.
        self._ending: int | None = None  # The exit code, if a call must end the manager when it returns.
        if start:
            self.start()

    def _held(self, call: str) -> _Held:
        return _Held(self, call)

    # Steps and tensors

    def step(
        self,
        timeout: float | None = None,
        accumulate: bool = True,
        parameters_changed: bool = True,
        repeat: bool = False,
        optimizer: torch.optim.Optimizer | None = None,
        clip_grad_norm: float | None = None,
    ) -> _native.StepResult:
        """As Manager.step(): `loss, samples = manager.step()`. Calls of several threads wait for each other."""
        made: list[_native.StepResult] = []
        try:
            with self._held("step"):
                self.loss_accumulated.value = 0.0
                self.gradients_accumulated.value = 0
                self.step_finished.clear()
                self.step_triggered._begin()
                before = self._made
                try:
                    super().step(timeout, accumulate, parameters_changed, repeat, optimizer, clip_grad_norm)
                    made = self._made
                    self._take_note(made[-1])
                    return made[-1]
                except BaseException as error:
                    made = self._made if self._made is not before else []
                    carry(error, made)
                    if hasattr(error, "step_result"):
                        self._take_note(error.step_result)
                    raise
                finally:
                    self.step_triggered._end()
                    self.step_finished.set()
        except BaseException as error:
            carry(error, made)
            raise

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
        self._process.watch(self.statistics().manager_pid)

    def recover(self) -> None:
        """As Manager.recover(); `pid` is that of the new manager process."""
        super().recover()
        self._process.watch(self.statistics().manager_pid)

    @property
    def pid(self) -> int | None:
        """The pid of the manager process; None before start()."""
        return self._process.pid

    @property
    def ident(self) -> int | None:
        """As pid."""
        return self._process.pid

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
        return self._process.exitcode(self.last_result)

    def is_alive(self) -> bool:
        """Whether the manager process runs."""
        return self.pid is not None and self.exitcode is None

    def join(self, timeout: float | None = None) -> None:
        """Waits until the manager process has ended, or for `timeout` seconds; UsageError before start()."""
        if self.pid is None:
            raise UsageError("join() was called on a manager that was not started")
        self._process.join(timeout, lambda: self.exitcode)

    def stop(self) -> None:
        """As Manager.stop(): bounded, idempotent."""
        self._end(0)

    def terminate(self) -> None:
        """As stop(), but it does not wait for a step: a step of another thread ends with ManagerLost.

        In a signal handler that interrupts step(), that step ends with ManagerLost too, and all processes have ended
        when step() returns.
        """
        if self.pid is not None:
            self._end(-signal.SIGTERM)

    def kill(self) -> None:
        """Kills manager and runners at once; returns when they have ended. In a signal handler: as terminate()."""
        if self.pid is not None:
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
            self._process.forget(code if ended is None else ended)
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


__all__ = [
    "DeviceQueue",
    "QueueDataset",
    "StepTrigger",
    "TPUDataManager",
    "TPUManager",
    "TPUSynchronizer",
]
