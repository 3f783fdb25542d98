"""Peer of the batch queue: hands memory to another process by multiprocessing.Queue and torch.multiprocessing.Queue.

Prints the median time from the call of put() to the return of get() in another process, which waits in it, for
  mp_queue            bytes through multiprocessing.Queue (pickled, through a pipe)
  torch_queue         a new tensor through torch.multiprocessing.Queue (moved to shared memory, descriptor passed)
  torch_queue_shared  a tensor that is in shared memory already: the best case of the same queue
"""

import argparse
import ctypes
import functools
import statistics
import time

import common
from common import FORK, emit, end

SIZES = [1 << 10, 1 << 14, 1 << 16, 1 << 18, 1 << 20]


def receive(queue, sent_ns, acknowledged, times_us, count):
    """Runs in the consumer. CLOCK_MONOTONIC is the same clock in all processes."""
    for index in range(count):
        item = queue.get()
        times_us[index] = (time.monotonic_ns() - sent_ns.value) / 1e3
        del item
        acknowledged.release()


def measure(queue, make_item, count, settle_s=0.0005):
    """Median one-way latency in microseconds. The pause before each item lets the consumer fall asleep in get()."""
    warmup = max(10, count // 10)
    sent_ns = FORK.RawValue(ctypes.c_int64)
    times_us = FORK.RawArray(ctypes.c_double, warmup + count)
    acknowledged = FORK.Semaphore(0)
    consumer = FORK.Process(
        target=receive, args=(queue, sent_ns, acknowledged, times_us, warmup + count), daemon=True
    )
    consumer.start()
    try:
        for _ in range(warmup + count):
            item = make_item()
            time.sleep(settle_s)
            sent_ns.value = time.monotonic_ns()
            queue.put(item)
            acknowledged.acquire()
        return statistics.median(list(times_us)[warmup:])
    finally:
        end([consumer])
        queue.close()
        queue.join_thread()


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes of an item")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    arguments = parser.parse_args()
    count = 50 if arguments.quick else 400

    common.settle_torch(1)
    import torch
    import torch.multiprocessing as torch_mp

    for size in arguments.sizes:

        new_tensor = functools.partial(torch.zeros, size, dtype=torch.uint8)
        payload, shared = bytes(size), new_tensor().share_memory_()
        for name, context, make_item in (
            ("mp_queue", FORK, lambda payload=payload: payload),
            ("torch_queue", torch_mp.get_context("fork"), new_tensor),
            ("torch_queue_shared", torch_mp.get_context("fork"), lambda shared=shared: shared),
        ):
            emit(name, "parked", "latency", measure(context.Queue(), make_item, count), "us", bytes=size)


if __name__ == "__main__":
    main()
