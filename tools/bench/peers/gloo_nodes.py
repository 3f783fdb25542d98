"""Measures all_reduce of ranks on several nodes, all in one gloo group. Every rank runs this script under a launcher.
Rank 0 prints the times of the slowest rank."""

import argparse
import statistics
import time

from common import emit, settle_torch

SIZES = [4, 4 * 2**10, 64 * 2**10, 2**20, 16 * 2**20, 64 * 2**20]
BUDGET_BYTES = 256 * 2**20


def median_us(dist, values, count):
    times = []
    for repetition in range(count + 2):
        dist.barrier()
        begin = time.perf_counter_ns()
        dist.all_reduce(values)
        if repetition >= 2:
            times.append((time.perf_counter_ns() - begin) / 1e3)
    return statistics.median(times)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    arguments = parser.parse_args()
    settle_torch(1)
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    for size in SIZES:
        full = max(5, min(200, BUDGET_BYTES // size))
        count = max(3, full // 8) if arguments.quick else full
        slowest = torch.tensor([median_us(dist, torch.zeros(size // 4), count)])
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        if dist.get_rank() == 0:
            emit("gloo", "all_reduce", "time", slowest.item(), "us", bytes=size)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
