"""TPUDataManager shards a dataset across the queues of devices, in a thread of this process."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import torch.utils.data

from accelmgr.errors import DataError, UsageError

logger = logging.getLogger("accelmgr.tpu_manager")

_SLICE_S = 0.2  # A wait looks this often for changes that do not wake it.


class _End:
    """Follows the last element in a queue. Holds the exception that ended the data, or None."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


class QueueDataset(torch.utils.data.IterableDataset[Any]):
    """Iterates over a queue until the data ends.

    timeout: seconds to wait for an element; then it raises DataError. None: it waits for ever.
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
        if (error := self._end.error) is not None:
            raise DataError(f"the dataset failed: {type(error).__name__}: {error}") from error

    def __len__(self) -> int:
        """A very large number: the real length is not known."""
        return 10**12


class TPUDataManager:
    """Puts element i of a dataset into the bounded queue of device i % nprocs, in a thread of this process.

    A full queue stops the thread; the other queues can still be read. In `TPUManager._data_manager` the manager
    process shards the elements instead (SessionData).
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
        except BaseException as error:  # The dataset may raise SystemExit, too.
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
        left = list(self.device_queues)  # A full queue that is not read must not keep the end from the others.
        while left and not self._closed.is_set():
            for device_queue in list(left):
                with contextlib.suppress(queue.Full):
                    device_queue.put(end, timeout=0 if device_queue is not left[-1] else _SLICE_S)
                    left.remove(device_queue)

    def get_device_dataloader(self, ordinal: int | None = None, **kwargs: Any) -> torch.utils.data.DataLoader[Any]:
        """A DataLoader over the queue of device `ordinal` (None: $LOCAL_RANK, or 0). kwargs: those of DataLoader."""
        if kwargs.get("num_workers"):
            raise UsageError("num_workers must be 0: the queues belong to this process")
        device = int(os.environ.get("LOCAL_RANK", "0")) if ordinal is None else ordinal
        if not 0 <= device < self.nprocs:
            raise UsageError(f"the device is {device}; it must be 0 to {self.nprocs - 1}")
        return torch.utils.data.DataLoader(QueueDataset(self.device_queues[device]), **kwargs)

    def close(self) -> None:
        """Ends the data for the readers of all queues. The thread ends after its current element. Idempotent."""
        self._closed.set()
        for device_queue in self.device_queues:
            self._end_now(device_queue)
        self._loader_thread.join(_SLICE_S)

    @staticmethod
    def _end_now(device_queue: Any) -> None:
        while True:
            with contextlib.suppress(queue.Full):
                device_queue.put_nowait(_End(None))
                return
            with contextlib.suppress(queue.Empty):
                device_queue.get_nowait()  # Makes room for the end.


_ELSEWHERE = (
    "elements are sharded by the manager process, straight into memory that the runners share: the host has no queue "
    "of them. TPUDataManager(dataset, nprocs) shards a dataset in this process"
)


def _elsewhere(self: Any, *arguments: Any, **keywords: Any) -> Any:
    raise UsageError(_ELSEWHERE)


class DeviceQueue:
    """Stands for a runner's queue, which is in the session. `maxsize`: prefetch. Its methods raise UsageError."""

    def __init__(self, rank: int, maxsize: int) -> None:
        self.rank, self.maxsize = rank, maxsize

    get = put = get_nowait = put_nowait = qsize = empty = full = _elsewhere


class SessionData(TPUDataManager):
    def __init__(self, dataset: Iterable[Any], nprocs: int, master_prefetch: int) -> None:
        self.dataset, self.nprocs = dataset, nprocs
        self.device_queues = [DeviceQueue(rank, master_prefetch) for rank in range(nprocs)]

    _loader_thread = property(_elsewhere)
    _load_data_into_queues = get_device_dataloader = _elsewhere

    def close(self) -> None:
        """Does nothing: the manager process shards the data and ends itself."""
