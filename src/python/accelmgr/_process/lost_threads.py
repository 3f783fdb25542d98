# Runs in: a manager or a runner that was forked.
"""Threads of the script that work for a dataset or a model: those of pools of threads and of processes (of
concurrent.futures and multiprocessing), of writers of TensorBoard, and of logging.handlers.QueueListener.

A fork has none of them, and what it hands to one would wait for ever.
"""

from __future__ import annotations

import functools
import logging.handlers
import queue
import sys
import threading
from collections.abc import Iterator
from typing import Any


def renew() -> None:
    """Call it in a fork: work that comes from now on is done here. Work that was there already is the host's."""
    if (futures := sys.modules.get("concurrent.futures.thread")) is not None:
        _renew_executors(futures)
    if (processes := sys.modules.get("concurrent.futures.process")) is not None:
        _renew_executors_of_processes(processes._ExecutorManagerThread)
    if (pools := sys.modules.get("multiprocessing.pool")) is not None:
        _renew_pools(pools)
    if (writers := sys.modules.get("tensorboard.summary.writer.event_file_writer")) is not None:
        _renew_writers(writers._AsyncWriterThread)
    _renew_listeners()


def _lost() -> Iterator[tuple[Any, Any]]:
    """The threads that the process had when it forked, and what each has called."""
    for thread in list(threading._dangling):  # type: ignore[attr-defined]
        yield thread, getattr(thread, "_target", None)


def _renew_executors(module: Any) -> None:
    # Where the module lists the threads of its pools, Python 3.13 clears.
    for thread, target in _lost():
        if target is not module._worker or (pool := thread._args[0]()) is None:
            continue
        pool._threads = set()
        pool._work_queue = queue.SimpleQueue()
        pool._idle_semaphore = threading.Semaphore(0)
        pool._shutdown_lock = threading.Lock()
    module._threads_queues.clear()


def _renew_executors_of_processes(kind: type) -> None:
    for thread, _ in _lost():  # Each executor that has begun has one.
        if isinstance(thread, kind) and (executor := thread.executor_reference()) is not None:  # type: ignore[attr-defined]
            executor.submit = functools.partial(_begin_executor, executor)


def _begin_executor(executor: Any, *call: Any, **keywords: Any) -> Any:
    """Called with the executor's first work, as _begin() is. Its processes are the host's children."""
    del executor.submit
    most = getattr(executor, "_max_tasks_per_child", None)
    executor.__init__(
        executor._max_workers,
        executor._mp_context,
        executor._initializer,
        executor._initargs,
        **({} if most is None else {"max_tasks_per_child": most}),
    )
    return executor.submit(*call, **keywords)


def _renew_pools(module: Any) -> None:
    for finalizer in module.util._finalizer_registry.values():  # Each pool that was not closed has one.
        reference = getattr(finalizer, "_weakref", None)
        if reference is not None and isinstance(pool := reference(), module.Pool):
            options = () if isinstance(pool, module.ThreadPool) else (pool._maxtasksperchild, pool._ctx)
            pool._check_running = functools.partial(_begin, pool, type(pool).__init__, options)


def _begin(pool: Any, begin: Any, options: tuple[Any, ...]) -> None:
    """Called before the pool's first work. Threads that began earlier would be lost in forks of this process."""
    del pool._check_running
    begin(pool, pool._processes, pool._initializer, pool._initargs, *options)


def _renew_writers(kind: type) -> None:
    for thread, _ in _lost():
        if isinstance(thread, kind):
            events: Any = thread._queue  # type: ignore[attr-defined]
            events.__init__(events.maxsize)
            events.put = functools.partial(_write, thread, events)


def _write(thread: Any, events: Any, *event: Any) -> None:
    """Called with the writer's first event: threads that began earlier would be lost in forks of this process."""
    del events.put
    threading.Thread(target=thread.run, daemon=True).start()
    events.put(*event)


def _renew_listeners() -> None:
    """Who logs into the queue of a listener does its work: the queues of multiprocessing alone reach the host's."""
    listeners = [getattr(target, "__self__", None) for _, target in _lost()]
    for listener in listeners:
        if isinstance(listener, logging.handlers.QueueListener):
            for reference in logging._handlerList:  # type: ignore[attr-defined]
                handler = reference()
                of_threads = isinstance(listener.queue, (queue.Queue, queue.SimpleQueue))
                if of_threads and getattr(handler, "queue", None) is listener.queue:
                    handler.enqueue = listener.handle
