"""What the peers share: one JSON line per result, process groups that end together, and torch settled for a
benchmark.

Import it before torch: the settings of OpenMP are read when torch loads.
"""

import ctypes
import json
import os
import statistics
import sys
import tempfile
import time

# A thread that waits inside OpenMP would spin on a core that another process of the same benchmark needs.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# gloo otherwise resolves the host's name, which may lead to another interface than the loopback.
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import multiprocessing as mp  # noqa: E402

FORK = mp.get_context("fork")


def emit(name, case, metric, value, unit, **extra):
    """Prints one result in the contract of tools/bench/run."""
    line = {"name": name, "case": case, "metric": metric, "value": value, "unit": unit, **extra}
    print(json.dumps(line), flush=True)


def keep_freed_pages():
    """Lets malloc keep large blocks: otherwise every gradient is mapped and faulted in anew, nearly half
    of a backward."""
    m_trim_threshold, m_mmap_max = -1, -4
    libc = ctypes.CDLL(None)
    libc.mallopt(m_mmap_max, 0)
    libc.mallopt(m_trim_threshold, 2**31 - 1)


def settle_torch(threads):
    """The settings of every process of every peer."""
    import torch

    torch.set_num_threads(threads)
    keep_freed_pages()


def run_ranks(target, world_size, *args):
    """Runs `target(rank, world_size, store_path, results, *args)` in forked processes; returns what they put
    in `results`.

    Call it before this process has computed anything: a fork after an OpenMP region hangs. If a rank fails,
    the others are killed and this process exits with 1.
    """
    with tempfile.TemporaryDirectory(prefix="accelmgr-bench-") as folder:
        results = FORK.SimpleQueue()
        store_path = os.path.join(folder, "store")
        ranks = [
            FORK.Process(target=target, args=(rank, world_size, store_path, results, *args), daemon=True)
            for rank in range(world_size)
        ]
        for rank in ranks:
            rank.start()
        collected = []
        try:
            wait_for(ranks, lambda: drain(results, collected))
        finally:
            end(ranks)
        drain(results, collected)
        return collected


def drain(results, collected):
    while not results.empty():
        collected.append(results.get())


def check(processes):
    """Ends this process with 1 if one of `processes` has failed."""
    for process in processes:
        if process.exitcode:
            sys.exit(f"process {process.name} of the benchmark failed with exit code {process.exitcode}")


def wait_for(processes, meanwhile=lambda: None):
    """Returns when all have ended well; ends this process with 1 as soon as one has not."""
    while any(process.is_alive() for process in processes):
        meanwhile()
        processes[0].join(0.05)
        check(processes)
    check(processes)


def die_with_parent():
    """For a process that starts others or outlives a crash: the kernel kills it with its parent."""
    pr_set_pdeathsig, sigkill = 1, 9
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, sigkill)


def end(processes):
    for process in processes:
        if process.is_alive():
            process.kill()
        process.join()


def join_gloo(rank, world_size, store_path):
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{store_path}", rank=rank, world_size=world_size)
    return dist


def time_cycles(cycle, warmup, count):
    """Median of `count` calls, in milliseconds."""
    for _ in range(warmup):
        cycle()
    times = []
    for _ in range(count):
        begin = time.perf_counter_ns()
        cycle()
        times.append(time.perf_counter_ns() - begin)
    return statistics.median(times) / 1e6
