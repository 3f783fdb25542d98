"""Functions of the peers: they print results as JSON lines, run processes that end together, and set torch up.

Import this module before torch, which reads the settings of OpenMP when it loads.
"""

import ctypes
import json
import os
import statistics
import sys
import tempfile
import time

# Otherwise a thread that waits inside OpenMP spins on a core that another process of the benchmark needs.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Otherwise gloo resolves the name of the host, which may lead to an interface other than the loopback.
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import multiprocessing as mp

FORK = mp.get_context("fork")


def emit(name, case, metric, value, unit, **extra):
    """Prints one result in the contract of tools/bench/run."""
    line = {"name": name, "case": case, "metric": metric, "value": value, "unit": unit, **extra}
    print(json.dumps(line), flush=True)


def keep_freed_pages():
    """Makes malloc keep large blocks. Otherwise every gradient is mapped and faulted in anew, which is nearly half of
    the time of a backward."""
    m_trim_threshold, m_mmap_max = -1, -4
    libc = ctypes.CDLL(None)
    libc.mallopt(m_mmap_max, 0)
    libc.mallopt(m_trim_threshold, 2**31 - 1)


def share_one_arena():
    """Makes all threads allocate where freed pages are kept. Other arenas give a heap of 64 MiB back when it is empty.

    Call it before there are threads.
    """
    m_arena_max = -8
    ctypes.CDLL(None).mallopt(m_arena_max, 1)


def settle_torch(threads):
    """Makes the settings of torch and malloc that all processes of all peers have."""
    import torch

    torch.set_num_threads(threads)
    keep_freed_pages()


def run_ranks(target, world_size, *args):
    """Runs `target(rank, world_size, store_path, results, *args)` in forked processes. Returns what they put into
    `results`.

    Call it before this process has computed anything: a child that is forked after an OpenMP region hangs. If a rank
    fails, the others are killed and this process exits with 1.
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
    """Returns when all processes have ended without an error. If one fails, ends this process with 1 at once."""
    while any(process.is_alive() for process in processes):
        meanwhile()
        processes[0].join(0.05)
        check(processes)
    check(processes)


def die_with_parent():
    """Makes the kernel kill this process when its parent ends, also by a crash."""
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
    """Median time of `count` calls in milliseconds."""
    for _ in range(warmup):
        cycle()
    times = []
    for _ in range(count):
        begin = time.perf_counter_ns()
        cycle()
        times.append(time.perf_counter_ns() - begin)
    return statistics.median(times) / 1e6
