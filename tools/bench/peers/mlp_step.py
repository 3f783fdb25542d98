"""Measures the training cycle of an MLP on two CPU runners: step, gradients, SGD, parameters published.

Modes
  ddp               torch's DistributedDataParallel over gloo: gradients are views of its buckets, the graph is static
  manager_faithful  the TPUManager pattern in Python multiprocessing (see tpu_manager.py)
  manager_best      its best variant: runners compute on the master's parameters, add gradients under locks in backward,
                    and wait on semaphores
  compute_only      forward and backward alone, one process
  compute_only_pair the same in two processes side by side: a lower bound of a cycle

Model, batch, threads and data are the same in every mode (tools/bench/shapes.json). Prints the median in ms.
"""

import argparse
import os
import tempfile
import time

import common
from common import emit, run_ranks, settle_torch, time_cycles

WARMUP_CYCLES = 5


def cycles(millions, quick):
    full = {"1": 200, "17": 40, "67": 15, "256": 5}[millions]
    return max(3, full // 5) if quick else full


def compute(rank, world_size, store_path, results, millions, count):
    settle_torch(1)
    import mlp

    dist = common.join_gloo(rank, world_size, store_path)
    model, batches = mlp.make_model(millions), mlp.resident_batches(millions, seed=rank)

    def forward_and_backward():
        mlp.loss_of(model, next(batches)).backward()
        model.zero_grad()

    dist.barrier()
    results.put(time_cycles(forward_and_backward, WARMUP_CYCLES, count))
    # Waits for the other process: one that measured on alone would be faster.
    dist.barrier()
    dist.destroy_process_group()


def ddp(rank, world_size, store_path, results, millions, count):
    settle_torch(1)
    import mlp
    from torch.nn.parallel import DistributedDataParallel

    dist = common.join_gloo(rank, world_size, store_path)
    model = DistributedDataParallel(mlp.make_model(millions), gradient_as_bucket_view=True, static_graph=True)
    optimizer, batches = mlp.make_optimizer(model.parameters()), mlp.resident_batches(millions, seed=rank)

    def cycle():
        loss = mlp.loss_of(model, next(batches))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()

    dist.barrier()
    results.put(time_cycles(cycle, WARMUP_CYCLES, count))
    dist.barrier()
    dist.destroy_process_group()


def with_manager(start, millions, count, host_threads):
    """Makes a manager by `start(model)` and is its host. Returns the median ms of a cycle, and the ms until the first
    step was done."""
    settle_torch(1)  # 1 thread: an OpenMP region before the forks hangs runners
    import mlp
    import torch

    model = mlp.make_model(millions)
    begin = time.perf_counter()
    manager = start(model)
    try:
        manager.step()
        first_step_ms = (time.perf_counter() - begin) * 1e3
        torch.set_num_threads(host_threads)
        optimizer = mlp.make_optimizer(manager.parameters)

        def cycle():
            manager.step()
            manager.optimize(optimizer)

        return time_cycles(cycle, WARMUP_CYCLES, count), first_step_ms
    finally:
        manager.stop()


def measure(arguments):
    """Median ms of a cycle, and for managers the ms until the first step. If each rank measures, the slower counts."""
    millions, count = arguments.parameters, cycles(arguments.parameters, arguments.quick)
    if arguments.mode == "ddp":
        return max(run_ranks(ddp, 2, millions, count)), None
    if arguments.mode.startswith("compute_only"):
        return max(run_ranks(compute, 2 if arguments.mode.endswith("pair") else 1, millions, count)), None
    import tpu_manager

    if arguments.mode == "manager_best":

        def start(model):
            return tpu_manager.AliasingManager(model, millions)

        return with_manager(start, millions, count, arguments.host_threads)
    with tempfile.TemporaryDirectory(prefix="accelmgr-bench-") as folder:

        def start(model):
            return tpu_manager.FaithfulManager(
                model, millions, os.path.join(folder, "store"), arguments.elements
            )

        return with_manager(start, millions, count, arguments.host_threads)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--mode",
        required=True,
        choices=["ddp", "manager_faithful", "manager_best", "compute_only", "compute_only_pair"],
    )
    parser.add_argument("--parameters", required=True, choices=["1", "17", "67", "256"], help="millions")
    parser.add_argument(
        "--elements",
        choices=["queue", "resident"],
        default="queue",
        help="manager_faithful: its data path, or batches in memory as in the other modes",
    )
    parser.add_argument(
        "--host-threads",
        type=int,
        default=os.cpu_count(),
        help="managers: threads of the host's optimizer, whose runners sleep meanwhile",
    )
    parser.add_argument("--quick", action="store_true", help="fewer cycles")
    arguments = parser.parse_args()

    import torch  # noqa: F401  (once, before any fork, instead of once in each rank)

    name = arguments.mode
    if name == "manager_faithful" and arguments.elements == "resident":
        name = "manager_faithful_resident"
    cycle_ms, first_step_ms = measure(arguments)
    emit(name, arguments.parameters + "M", "cycle", cycle_ms, "ms")
    if first_step_ms is not None:
        emit(name, arguments.parameters + "M", "first_step", first_step_ms, "ms")


if __name__ == "__main__":
    main()
