"""Measures the time to start 2 and 8 ranks: from the call until all ranks are past one barrier.

Ways of torch, with a barrier over gloo: warm_fork (multiprocessing's fork in a process that has imported torch),
mp_spawn (torch.multiprocessing.spawn), torchrun (with this script as the program). ours_python is the same script under
`accelmgr spawn`. ours_program is a C++ program under `accelmgr spawn` that uses accelmgr's collectives.
"""

import argparse
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

from common import FORK, emit, end, join_gloo, wait_for


def past_a_barrier(rank, world_size, store_path, times_folder):
    dist = join_gloo(rank, world_size, store_path)
    dist.barrier()
    # CLOCK_MONOTONIC is the same clock in all processes.
    pathlib.Path(times_folder, str(rank)).write_text(str(time.monotonic_ns()))
    dist.destroy_process_group()


def last_past(folder, world_size):
    return max(int(pathlib.Path(folder, str(rank)).read_text()) for rank in range(world_size))


def warm_fork(world_size, folder):
    begin = time.monotonic_ns()
    arguments = (world_size, os.path.join(folder, "store"), folder)
    ranks = [FORK.Process(target=past_a_barrier, args=(rank, *arguments), daemon=True) for rank in range(world_size)]
    for rank in ranks:
        rank.start()
    try:
        wait_for(ranks)
    finally:
        end(ranks)
    return begin


def mp_spawn(world_size, folder):
    import torch.multiprocessing

    begin = time.monotonic_ns()
    arguments = (world_size, os.path.join(folder, "store"), folder)
    torch.multiprocessing.spawn(past_a_barrier, args=arguments, nprocs=world_size)
    return begin


def run_launcher(*command):
    begin = time.monotonic_ns()
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        sys.exit(f"{command[0]} failed with exit code {done.returncode}:\n{done.stdout[-4000:]}")
    return begin


def torchrun(world_size, folder):
    program = pathlib.Path(sys.executable).with_name("torchrun")
    return run_launcher(program, "--standalone", f"--nproc-per-node={world_size}", __file__, "--as-rank", folder)


def accelmgr_spawn(accelmgr, program):
    """A function that starts `program` under `accelmgr spawn`. The program must take --as-rank FOLDER."""

    def start(world_size, folder):
        return run_launcher(accelmgr, "spawn", f"--nprocs={world_size}", "--", *program, "--as-rank", folder)

    return start


def as_rank(folder):
    """Runs in each rank of a launcher: joins the group that the environment describes, and writes the time."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    dist.barrier()
    pathlib.Path(folder, os.environ["RANK"]).write_text(str(time.monotonic_ns()))
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--accelmgr", metavar="PROGRAM", help="the program accelmgr")
    parser.add_argument("--rank-program", metavar="PROGRAM", help="bench_launch, which `accelmgr spawn` runs")
    parser.add_argument("--as-rank", metavar="FOLDER", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.as_rank:
        as_rank(arguments.as_rank)
        return

    import torch.distributed  # noqa: F401  (a warm fork has it)

    ways = {
        "warm_fork": warm_fork,
        "mp_spawn": mp_spawn,
        "torchrun": torchrun,
        "ours_python": accelmgr_spawn(arguments.accelmgr, [sys.executable, __file__]),
        "ours_program": accelmgr_spawn(arguments.accelmgr, [arguments.rank_program]),
    }
    for world_size in (2, 8):
        for name, way in ways.items():
            count = (1 if arguments.quick else 2) if name != "warm_fork" else (3 if arguments.quick else 9)
            times = []
            for _ in range(count):
                with tempfile.TemporaryDirectory(prefix="accelmgr-bench-") as folder:
                    begin = way(world_size, folder)
                    times.append((last_past(folder, world_size) - begin) / 1e6)
            emit(name, str(world_size), "start_up", statistics.median(times), "ms")


if __name__ == "__main__":
    main()
