# Runs in: a manager or a runner that was forked.
"""Pools of threads of the script, which a dataset or a model uses: concurrent.futures.ThreadPoolExecutor, and
multiprocessing.pool.ThreadPool.

A fork has none of their threads, and a pool that has started all of its threads starts no more: submitted work would
wait for ever.
"""

from __future__ import annotations

import functools
import queue
import sys
import threading
from typing import Any


def renew() -> None:
    """Call it in a fork: the pools begin anew, with the first work. Work that they had is the host's."""
    if (futures := sys.modules.get("concurrent.futures.thread")) is not None:
        _renew_executors(futures)
    if (pools := sys.modules.get("multiprocessing.pool")) is not None:
        _renew_thread_pools(pools)


def _renew_executors(module: Any) -> None:
    # The threads that the process had when it forked. Where the module lists those of its pools, Python 3.13 clears.
    for thread in list(threading._dangling):  # type: ignore[attr-defined]
        if getattr(thread, "_target", None) is not module._worker:
            continue
        if (pool := thread._args[0]()) is None:
            continue
        pool._threads = set()
        pool._work_queue = queue.SimpleQueue()
        pool._idle_semaphore = threading.Semaphore(0)
        pool._shutdown_lock = threading.Lock()
    module._threads_queues.clear()


def _renew_thread_pools(module: Any) -> None:
    for finalizer in module.util._finalizer_registry.values():  # Each pool that was not closed has one.
        reference = getattr(finalizer, "_weakref", None)
        if reference is not None and isinstance(pool := reference(), module.ThreadPool):
            pool._check_running = functools.partial(_begin, pool, type(pool).__init__)


def _begin(pool: Any, begin: Any) -> None:
    """Called before the pool's first work. Threads that began earlier would be lost in forks of this process."""
    del pool._check_running
    begin(pool, pool._processes, pool._initializer, pool._initargs)
