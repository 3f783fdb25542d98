"""TPUManager under its own names: a script written for the original runs with nothing changed but its import.

    from accelmgr.compat.tpu_manager import TPUManager   # or: from accelmgr import TPUManager

    manager = TPUManager(model, dataset, nprocs=8, batch_size_per_device=4, start=True)
    loss, samples = manager.step()
    gradients = manager.get_aggregated_gradients()

What is different on purpose: step() always returns; an element's end, a lost runner or a number that is not finite are
its error; `samples` is what took part; update_model_parameters() writes to the master, all of it or nothing; runners
never compute with half of an update; what was started is ended, with the host at the latest. Its processes are not
forked of the host's memory, so a name that raises here where the original had one says what to use in its place.

Source: the class TPUManager of hivemind's examples (torch_xla), whose names, signatures and defaults these are.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import itertools
import logging
import multiprocessing
import os
import queue
import re
import select
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.utils.data

from accelmgr import _native
from accelmgr.errors import DataError, ModelError, UsageError
from accelmgr.manager import Manager

logger = logging.getLogger("accelmgr.tpu_manager")

# Locks, events and values as the original had them; of the context that needs no resource tracker.
_context = multiprocessing.get_context("fork")
_numbers = itertools.count(1)
_SLICE_S = 0.2  # Within which a wait sees what cannot wake it.


def _parameters(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.detach() for tensor in tensors]


class TPUManager(Manager):
    """A Manager with the names of the original, which was a Process.

    Of the original: nprocs, prefetch, batch_size_per_device, grad_accumulation_steps, seed_base, collate_fn, as in its
    signature; more is configured by the environment (`ACCELMGR_STEP_TIMEOUT`), or with accelmgr.Manager. Elements are
    mappings (the model's keyword arguments), tuples or tensors.

    lock: held by update_model_parameters(), get_aggregated_gradients(), zero_grad() and step(): a thread that calls one
        of them during another waits. It cannot be entered twice: who holds it and calls one of them gets UsageError after
        `step_timeout` seconds.
    step_triggered: `is_set()` from the moment a step is asked for until runners have begun it. `set()` asks for one: it
        runs in a thread, and `step_finished` is set after it.
    step_finished: set after a step, also a failed one (`gradients_accumulated.value` is 0 then); cleared as one begins.
    should_load_parameters: `.value` is True from update_model_parameters() until a step was made with them.
    gradients_accumulated, loss_accumulated: `.value`: samples and mean loss of the last step; 0 during a step.
    last_result: the StepResult of the last step; None before.
    """

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
            start=False,
        )
        self.nprocs, self.prefetch, self.seed_base = nprocs, prefetch, seed_base
        self.batch_size_per_device, self.grad_accumulation_steps = batch_size_per_device, grad_accumulation_steps
        self.name = f"TPUManager-{next(_numbers)}"
        self.lock = _context.Lock()
        self.step_triggered, self.step_finished = StepTrigger(self), _context.Event()
        self.should_load_parameters = _context.Value(ctypes.c_bool, False)
        self.gradients_accumulated = _context.Value(ctypes.c_long, 0)
        self.loss_accumulated = _context.Value(ctypes.c_double, 0.0)
        self.last_result: _native.StepResult | None = None
        self._synchronizer: TPUSynchronizer = _SessionSynchronizer(model, self)
        self._data_manager: TPUDataManager = _SessionData(dataset, nprocs, prefetch)
        self._pid: int | None = None
        self._pidfd = -1
        self._exitcode: int | None = None
        found = re.search(r"^step_timeout: *([0-9.e+]+)", self.config, re.MULTILINE)
        self._patience_s = float(found.group(1)) if found else 300.0
        if start:
            self.start()

    @contextlib.contextmanager
    def _held(self, call: str) -> Iterator[None]:
        if not self.lock.acquire(timeout=self._patience_s):
            raise UsageError(
                f"{call}() waited {self._patience_s:g} s for the manager's lock; do not call it while you hold the lock"
            )
        try:
            yield
        finally:
            self.lock.release()

    # Steps and tensors

    def step(
        self, timeout: float | None = None, accumulate: bool = True, parameters_changed: bool = True
    ) -> _native.StepResult:
        """As Manager.step(): `loss, samples = manager.step()`. Other threads' calls wait for it; it waits for theirs."""
        with self._held("step"):
            self.loss_accumulated.value = 0.0
            self.gradients_accumulated.value = 0
            self.step_finished.clear()
            self.step_triggered._begin()
            try:
                result = super().step(timeout, accumulate, parameters_changed)
                self.last_result = result
                if result.counted:
                    self.should_load_parameters.value = False
                    self.loss_accumulated.value = result.loss
                    self.gradients_accumulated.value = result.samples
                return result
            finally:
                self.step_triggered._end()
                self.step_finished.set()

    def update_model_parameters(self, parameters: Iterable[torch.Tensor]) -> None:
        """Replaces the master's parameters, in the order of `model.parameters()`, before the next step.

        All or nothing: count, shapes and dtypes are checked before anything is written (ModelError). Waits for a step of
        another thread.
        """
        values = _parameters(parameters)
        with self._held("update_model_parameters"):
            self._synchronizer.set_host_parameters(values)
            self.should_load_parameters.value = True

    def get_aggregated_gradients(self) -> list[torch.Tensor]:
        """The master's gradients in the order of `model.parameters()`: views, the same at every call. Waits for a step
        of another thread; hold `lock` while you read them where one may begin."""
        with self._held("get_aggregated_gradients"):
            return self._synchronizer.get_aggregated_gradients()

    def zero_grad(self) -> None:
        """Zeroes the master's gradients, in place. Waits for a step of another thread."""
        with self._held("zero_grad"):
            super().zero_grad()

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
        with contextlib.suppress(ProcessLookupError):  # It has ended already: exitcode says how.
            self._pidfd = os.pidfd_open(self._pid)

    def _close_pidfd(self) -> None:
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1

    @property
    def pid(self) -> int | None:
        """Of the manager process; None before start()."""
        return self._pid

    @property
    def ident(self) -> int | None:
        """As pid."""
        return self._pid

    @property
    def daemon(self) -> bool:
        """True: nothing that a manager starts outlives the host."""
        return True

    @daemon.setter
    def daemon(self, value: bool) -> None:
        if not value:
            raise UsageError("daemon = False: the manager ends with this process; join() it to wait for its end")

    @property
    def exitcode(self) -> int | None:
        """Of the manager process: None until it has ended; 0 after stop(), -15 after terminate(), -N by a signal N."""
        if self._exitcode is None and self._pid is not None:
            self._exitcode = self._ended_with()
        return self._exitcode

    def _ended_with(self) -> int | None:
        try:
            if self._pidfd < 0:
                raise ChildProcessError
            ended = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # The session has taken note of its end already.
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
        """Waits until the manager process has ended, or for `timeout` seconds. Ctrl-C ends it. UsageError before start()."""
        if self._pid is None:
            raise UsageError("join() of a manager that was not started")
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
        """As stop(); a step of another thread ends with ManagerLost."""
        if self._pid is not None:
            self._end(-signal.SIGTERM)

    def kill(self) -> None:
        """Kills manager and runners at once, and returns when they have ended."""
        if self._pid is not None:
            self._handle.kill()
            self._end(-signal.SIGKILL)

    def close(self) -> None:
        """As stop()."""
        self.stop()

    def _end(self, code: int) -> None:
        held = self.lock.acquire(block=False)
        if not held and code != 0:  # A step of another thread returns at once when nobody is left to make it.
            self._handle.kill()
            held = self.lock.acquire(timeout=self._patience_s)
        try:
            ended = self.exitcode
            super().stop()
            if self._pid is not None and self._exitcode is None:
                self._exitcode = code if ended is None else ended
            self._close_pidfd()
        finally:
            if held:
                self.lock.release()

    # What the processes of the original ran

    def run(self) -> None:
        """The body of the original's process. UsageError: start() starts it."""
        raise UsageError("run() is what the manager process does; start() starts it")

    def runner(self, tpu_index: int) -> None:
        """The body of the original's runners. UsageError: they are processes of their own; step() has them work."""
        raise UsageError(
            f"runner({tpu_index}) is what a runner process does; start() starts {self.nprocs} of them, step() has them work"
        )

    def _mark_step_finished(self, loss: float) -> None:
        """Says to who waits for `step_finished` that a full step with this mean loss was made."""
        self.gradients_accumulated.value = self.batch_size_per_device * self.nprocs * self.grad_accumulation_steps
        self.loss_accumulated.value = float(loss)
        self.step_finished.set()


class StepTrigger:
    """TPUManager.step_triggered. Any thread."""

    def __init__(self, manager: TPUManager) -> None:
        self._manager = manager
        self._asked = threading.Condition()
        self._pending = False  # Asked for, and step() has not begun.
        self._after: int | None = None  # Attempts until the step that is under way.

    def set(self) -> None:
        """Asks for a step, in a thread of its own; one at a time. How it went is in `last_result`."""
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
            logger.exception("the step that step_triggered.set() asked for")
            with self._asked:
                self._pending = False
            self._manager.step_finished.set()
            return
        if not result.ok:
            logger.error("the step that step_triggered.set() asked for: %s: %s", result.status, result.error)

    def is_set(self) -> bool:
        """Whether a step was asked for that no runner has begun."""
        with self._asked:
            return self._pending or (self._after is not None and not self._begun(self._after))

    def _begun(self, after: int) -> bool:
        return any(runner.attempt > after for runner in self._manager.statistics().runners)

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until a step is asked for, or for `timeout` seconds; whether one was."""
        with self._asked:
            return self._asked.wait_for(lambda: self._pending or self._after is not None, timeout)

    def clear(self) -> None:
        """Nothing: a step that was asked for is made. It is cleared when runners begin it."""

    def _begin(self) -> None:
        with self._asked:
            self._pending = False
            last = self._manager.last_result
            self._after = last.attempt if last is not None else 0
            self._asked.notify_all()

    def _end(self) -> None:
        with self._asked:
            self._after = None


def _assign(source: Iterable[torch.Tensor], target: Iterable[torch.Tensor], add: bool, strict: bool = False) -> None:
    sources, targets = list(source), list(target)
    if len(sources) != len(targets):
        raise ModelError(f"{len(sources)} source tensors for {len(targets)} target tensors; nothing was changed")
    for index, (one, other) in enumerate(zip(sources, targets, strict=True)):
        kinds = [(tuple(one.shape), one.device, one.dtype), (tuple(other.shape), other.device, other.dtype)]
        if kinds[0] != kinds[1] if strict else kinds[0][0] != kinds[1][0]:
            texts = [f"{dtype} {list(shape)} on {device}" for shape, device, dtype in kinds]
            raise ModelError(f"source tensor {index} is {texts[0]}, its target {texts[1]}; nothing was changed")
    with torch.no_grad():
        for one, other in zip(sources, targets, strict=True):
            if add:
                other.add_(one.to(other.device))
            else:
                other.copy_(one)


class TPUSynchronizer:
    """A master model in shared memory with its gradients, and the copies to and from a replica of it.

    By itself: of `model`, which is moved to shared memory, with gradients of zeros. `TPUManager._synchronizer` is one over
    the session. Not thread-safe: TPUManager.lock is.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.master_model = model.share_memory()
        for parameter in self.master_model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad.share_memory_()

    def get_device_model_replica(self, device: torch.device | str, tie_weights: bool = True) -> torch.nn.Module:
        """A copy of the master on `device`, with gradients of zeros; tied weights are tied, once more by the model's own
        tie_weights() where it has one."""
        replica = copy.deepcopy(self.master_model).to(device)
        if tie_weights and callable(tie := getattr(replica, "tie_weights", None)):
            tie()
        for parameter in replica.parameters():
            parameter.grad = torch.zeros_like(parameter)
        return replica

    def set_host_parameters(self, new_host_parameters: Iterable[torch.Tensor]) -> None:
        """Copies them into the master's; ModelError (count, shape, device, dtype), and nothing has changed then."""
        self._assign(source=_parameters(new_host_parameters), target=self.master_model.parameters(), add=False, strict=True)

    def get_aggregated_gradients(self) -> list[torch.Tensor]:
        """The master's gradients, one for each parameter; no copies."""
        return [parameter.grad for parameter in self.master_model.parameters() if parameter.grad is not None]

    def send_params_to_device(self, replica: torch.nn.Module) -> None:
        """Copies the master's parameters into the replica's."""
        self._assign(source=self.master_model.parameters(), target=replica.parameters(), add=False)

    def aggregate_grads_on_host(self, replica: torch.nn.Module, *, add: bool) -> None:
        """Adds the gradients of a replica of this process to the master's, or overwrites these; a missing one is zero."""
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in replica.parameters()]
        self._assign(source=gradients, target=self.get_aggregated_gradients(), add=add)

    def _assign(
        self, source: Iterable[torch.Tensor], target: Iterable[torch.Tensor], add: bool, strict: bool = False
    ) -> None:
        """Copies, or adds, source to target. ModelError before anything is written: another number of tensors, other
        shapes; strict: other devices or dtypes."""
        _assign(source, target, add, strict)


class _SessionSynchronizer(TPUSynchronizer):
    """The master is the session's: its parameters are those of the host's model."""

    def __init__(self, model: torch.nn.Module, manager: TPUManager) -> None:
        self.master_model = model
        self._manager = manager

    def set_host_parameters(self, new_host_parameters: Iterable[torch.Tensor]) -> None:
        Manager.update_model_parameters(self._manager, new_host_parameters)

    def get_aggregated_gradients(self) -> list[torch.Tensor]:
        return Manager.get_aggregated_gradients(self._manager)


class _End:
    """Behind the last element of a queue; with the exception that ended the data."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


class QueueDataset(torch.utils.data.IterableDataset[Any]):
    """A dataset that ceaselessly iterates over a queue, until the data ends.

    timeout: seconds to wait for an element, DataError then; None: for ever.
    """

    def __init__(self, queue: Any, timeout: float | None = None) -> None:
        super().__init__()
        self.queue = queue
        self.timeout = timeout
        self._end: _End | None = None

    def __iter__(self) -> Iterator[Any]:
        while self._end is None:
            try:
                element = self.queue.get(timeout=self.timeout)
            except queue.Empty:
                raise DataError(f"no element came within {self.timeout:g} s") from None
            if isinstance(element, _End):
                self._end = element
            else:
                yield element
        if self._end.error is not None:
            raise DataError(f"the dataset failed: {type(self._end.error).__name__}: {self._end.error}") from self._end.error

    def __len__(self) -> int:
        """Very many: nobody knows how many there will be."""
        return 10**12


class TPUDataManager:
    """Deals element i of a dataset to the bounded queue of device i % nprocs, in a thread of this process.

    A full queue stops the dealing, not the use of what the others hold. `TPUManager._data_manager` is the session's, whose
    elements are dealt by the manager process.
    """

    def __init__(self, dataset: Iterable[Any], nprocs: int, master_prefetch: int = 16) -> None:
        self.dataset, self.nprocs = dataset, nprocs
        self.device_queues: list[Any] = [queue.Queue(master_prefetch) for _ in range(nprocs)]
        self._closed = threading.Event()
        self._loader_thread = threading.Thread(target=self._load_data_into_queues, daemon=True)
        self._loader_thread.start()

    def _load_data_into_queues(self) -> None:
        end = _End(None)
        try:
            for i, element in enumerate(self.dataset):
                if not self._put(i % self.nprocs, element):
                    return
        except Exception as error:
            end = _End(error)
        finally:
            logger.warning("Minibatch generator finished.")
            self._put_ends(end)

    def _put(self, device: int, element: Any) -> bool:
        while not self._closed.is_set():
            with contextlib.suppress(queue.Full):
                self.device_queues[device].put(element, timeout=_SLICE_S)
                return True
        return False

    def _put_ends(self, end: _End) -> None:
        left = list(self.device_queues)  # A queue that nobody empties does not keep it from the others.
        while left and not self._closed.is_set():
            for device_queue in list(left):
                with contextlib.suppress(queue.Full):
                    device_queue.put(end, timeout=0 if device_queue is not left[-1] else _SLICE_S)
                    left.remove(device_queue)

    def get_device_dataloader(self, ordinal: int | None = None, **kwargs: Any) -> torch.utils.data.DataLoader[Any]:
        """Batches of one device's queue; keywords are DataLoader's. ordinal: None is this process's LOCAL_RANK, or 0."""
        if kwargs.get("num_workers"):
            raise UsageError("num_workers: the queues are this process's; pass 0")
        device = int(os.environ.get("LOCAL_RANK", "0")) if ordinal is None else ordinal
        if not 0 <= device < self.nprocs:
            raise UsageError(f"device {device} of {self.nprocs}")
        return torch.utils.data.DataLoader(QueueDataset(self.device_queues[device]), **kwargs)

    def close(self) -> None:
        """Ends the thread, as soon as the dataset has given its element. Idempotent."""
        self._closed.set()
        self._loader_thread.join(_SLICE_S)


_ELSEWHERE = (
    "elements are dealt by the manager process, straight into memory that the runners share: the host has no queue of them. "
    "TPUDataManager(dataset, nprocs) deals a dataset in this process"
)


class DeviceQueue:
    """The queue of a runner, which is in the session: `rank`, and `maxsize` elements (prefetch). The rest is UsageError."""

    def __init__(self, rank: int, maxsize: int) -> None:
        self.rank, self.maxsize = rank, maxsize

    def _elsewhere(self, *arguments: Any, **keywords: Any) -> Any:
        raise UsageError(_ELSEWHERE)

    get = put = get_nowait = put_nowait = qsize = empty = full = _elsewhere


class _SessionData(TPUDataManager):
    def __init__(self, dataset: Iterable[Any], nprocs: int, master_prefetch: int) -> None:
        self.dataset, self.nprocs = dataset, nprocs
        self.device_queues = [DeviceQueue(rank, master_prefetch) for rank in range(nprocs)]

    def __getattr__(self, name: str) -> Any:
        if name == "_loader_thread":
            raise UsageError(_ELSEWHERE)
        raise AttributeError(name)

    def _load_data_into_queues(self) -> None:
        raise UsageError(_ELSEWHERE)

    def get_device_dataloader(self, ordinal: int | None = None, **kwargs: Any) -> torch.utils.data.DataLoader[Any]:
        raise UsageError(_ELSEWHERE)

    def close(self) -> None:
        """Nothing: the manager ends what it has."""


__all__ = [
    "DeviceQueue",
    "QueueDataset",
    "StepTrigger",
    "TPUDataManager",
    "TPUManager",
    "TPUSynchronizer",
]
