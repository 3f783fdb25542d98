"""Peer of the collectives between private tensors: torch.distributed over gloo, two processes of this machine.

Prints the median time of a call on the slower rank: barrier, all_reduce of 4 B to 256 MiB, and all_gather_object of
objects whose pickles have about 100 B and 100 KB.
"""

import argparse
import functools
import statistics
import time

from common import emit, join_gloo, run_ranks, settle_torch

SIZES = [4 * 16**power for power in range(6)] + [16 * 2**20, 64 * 2**20, 256 * 2**20]  # 4 B to 4 MiB, and on
OBJECTS = {100: "x" * 60, 100_000: "x" * 100_000}


def repetitions(size_bytes, quick):
    """Makes each size take about the same time. Depends only on the arguments: both ranks must get the same number."""
    full = max(7, min(400, 256 * 2**20 // max(size_bytes, 1)))
    return max(3, full // 8) if quick else full


def median_us(dist, call, count):
    """Median time of a call. The ranks begin each call together; the first two calls are not counted."""
    times = []
    for repetition in range(count + 2):
        dist.barrier()
        begin = time.perf_counter_ns()
        call()
        if repetition >= 2:
            times.append((time.perf_counter_ns() - begin) / 1e3)
    return statistics.median(times)


def measure(rank, world_size, store_path, results, sizes, quick):
    settle_torch(1)
    import torch

    dist = join_gloo(rank, world_size, store_path)
    results.put(("barrier", 0, median_us(dist, dist.barrier, repetitions(0, quick))))
    for size in sizes:
        values = torch.full((size // 4,), 1.0 / world_size)
        us = median_us(dist, functools.partial(dist.all_reduce, values), repetitions(size, quick))
        results.put(("all_reduce", size, us))
    for size, value in OBJECTS.items():
        gathered = [None] * world_size
        gather = functools.partial(dist.all_gather_object, gathered, value)
        us = median_us(dist, gather, repetitions(size, quick))
        results.put(("all_gather_object", size, us))
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="every second size, fewer repetitions")
    arguments = parser.parse_args()
    sizes = SIZES[::2] if arguments.quick else SIZES

    import torch  # noqa: F401  (once, before the fork, instead of once in each rank)

    slower = {}
    for call, size, us in run_ranks(measure, 2, sizes, arguments.quick):
        slower[call, size] = max(us, slower.get((call, size), 0.0))
    for (call, size), us in slower.items():
        emit("gloo", call, "time", us, "us", bytes=size)


if __name__ == "__main__":
    main()
