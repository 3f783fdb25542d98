# Runs in: a manager or a runner that was forked.
"""Pools of threads of the script (concurrent.futures.ThreadPoolExecutor), which a dataset or a model uses.

A fork has none of their threads, and a pool that has started all of its threads starts no other ones: what is submitted
would wait for ever.
"""

from __future__ import annotations

import queue
import sys
import threading
from typing import Any


def renew() -> None:
    """Call it in a fork: the pools begin anew, with the first work. Work that they had is the host's."""
    module: Any = sys.modules.get("concurrent.futures.thread")
    if module is None:
        return
    for thread in list(module._threads_queues):
        reference, *_ = getattr(thread, "_args", None) or (lambda: None,)
        if (pool := reference()) is None:
            continue
        pool._threads = set()
        pool._work_queue = queue.SimpleQueue()
        pool._idle_semaphore = threading.Semaphore(0)
        pool._shutdown_lock = threading.Lock()
    module._threads_queues.clear()
