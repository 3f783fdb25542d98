"""torch.distributed over gloo, two processes on this machine: the peer of the collectives between private tensors.

Prints the median time of one call, of the slower rank: barrier, all_reduce of 4 B to 256 MiB, all_gather_object of
objects whose pickles have about 100 B and 100 KB.
"""

import argparse
import statistics
import time

from common import emit, join_gloo, run_ranks, settle_torch

SIZES = [4 * 16**power for power in range(6)] + [16 * 2**20, 64 * 2**20, 256 * 2**20]  # 4 B to 4 MiB, and on
OBJECTS = {100: "x" * 60, 100_000: "x" * 100_000}


def repetitions(size_bytes, quick):
    """About as long for every size; both ranks must come to the same number by themselves."""
    full = max(7, min(400, 256 * 2**20 // max(size_bytes, 1)))
    return max(3, full // 8) if quick else full


def median_us(dist, call, count):
    """Each call begins together; the first two are not counted."""
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
        us = median_us(dist, lambda: dist.all_reduce(values), repetitions(size, quick))
        results.put(("all_reduce", size, us))
    for size, value in OBJECTS.items():
        gathered = [None] * world_size
        us = median_us(dist, lambda: dist.all_gather_object(gathered, value), repetitions(size, quick))
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
