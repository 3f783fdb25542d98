"""Peer of the reduction: torch.distributed's all_reduce over gloo between two processes of this machine.

Prints for every size the median time of a call on the slower rank.
"""

import argparse
import statistics
import time

from common import emit, join_gloo, run_ranks, settle_torch

KIB = 1024
SIZES = [4 * KIB * 4**power for power in range(9)]  # to 256 MiB


def repetitions(size_bytes, quick):
    """Makes each size take about the same time. Depends only on the arguments: both ranks must get the same number."""
    full = max(7, min(400, 256 * 1024 * KIB // size_bytes))
    return max(3, full // 8) if quick else full


def measure(rank, world_size, store_path, results, sizes, quick):
    settle_torch(1)
    import torch

    dist = join_gloo(rank, world_size, store_path)
    for size in sizes:
        values = torch.full((size // 4,), 1.0 / world_size)
        times = []
        for repetition in range(repetitions(size, quick) + 2):
            dist.barrier()
            begin = time.perf_counter_ns()
            dist.all_reduce(values)
            if repetition >= 2:
                times.append((time.perf_counter_ns() - begin) / 1e3)
        results.put((size, statistics.median(times)))
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", help="bytes per rank")
    parser.add_argument("--quick", action="store_true", help="every second size, fewer repetitions")
    arguments = parser.parse_args()
    sizes = arguments.sizes or (SIZES[::2] if arguments.quick else SIZES)

    import torch  # noqa: F401  (once, before the fork, instead of once in each rank)

    measured = run_ranks(measure, 2, sizes, arguments.quick)
    for size in sizes:
        slower = max(us for measured_size, us in measured if measured_size == size)
        emit("gloo", "all_reduce", "time", slower, "us", bytes_per_runner=size, dtype="fp32")


if __name__ == "__main__":
    main()
