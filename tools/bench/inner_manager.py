"""Training steps with fused AdamW for `tools/bench/run inner`: the optimizer in the runners, in the host, and in a
plain loop of PyTorch. Prints lines of the contract.

usage: inner_manager.py --mode inner|host|plain --parameters 1|17|67|256 --runners 1|2 [--clip] [--quick]
"""

from __future__ import annotations

import argparse
import os
import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).parent / "peers"))

import common
import mlp
import torch
from mlp_step import WARMUP_CYCLES, cycles
from python_manager import Net, Resident

import accelmgr

NORM = 1.0


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 1e-4, fused=True)


def measure_plain(millions: str, batch_size: int, clip: bool, count: int) -> float:
    torch.set_num_threads(os.cpu_count() or 1)
    model = mlp.make_model(millions)
    optimizer = optimizer_of(model)
    inputs, targets = mlp.make_elements(millions, seed=1)
    batches = list(zip(inputs.split(batch_size), targets.split(batch_size), strict=True))
    made = 0

    def cycle() -> None:
        nonlocal made
        loss = mlp.loss_of(model, batches[made % len(batches)])
        loss.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), NORM)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        made += 1

    return common.time_cycles(cycle, WARMUP_CYCLES, count)


def measure_manager(arguments: argparse.Namespace, case: str, count: int) -> float:
    model, clip = Net(arguments.parameters), NORM if arguments.clip else None
    optimizer = optimizer_of(model)
    with accelmgr.Manager(
        model,
        Resident(arguments.parameters),
        nprocs=arguments.runners,
        batch_size_per_device=mlp.BATCH_SIZE,
        prefetch=2 * mlp.BATCH_SIZE,
        deterministic=False,
        step_timeout=300,
        runners={"threads": max(1, (os.cpu_count() or 1) // arguments.runners)},
        start_method="fork",
    ) as manager:

        def inner() -> None:
            manager.step(optimizer=optimizer, clip_grad_norm=clip).raise_for_status()

        def host() -> None:
            manager.step(accumulate=False).raise_for_status()
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()

        torch.set_num_threads(os.cpu_count() or 1)  # For what this process computes: the runners sleep meanwhile.
        if arguments.mode == "host":
            return common.time_cycles(host, WARMUP_CYCLES, count)
        ms = common.time_cycles(inner, WARMUP_CYCLES, count)
        manager.sync()  # Its memory is new.
        inner()
        begin = time.perf_counter()
        manager.sync()
        common.emit("ours", case, "sync", (time.perf_counter() - begin) * 1e3, "ms")
        return ms


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mode", required=True, choices=["inner", "host", "plain"])
    parser.add_argument("--parameters", required=True, choices=list(mlp.SHAPES["shapes"]), help="millions")
    parser.add_argument("--runners", required=True, type=int, choices=[1, 2])
    parser.add_argument("--clip", action="store_true", help="clip the norm of the gradient")
    parser.add_argument("--quick", action="store_true", help="fewer cycles")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    case = f"{arguments.parameters}M, {arguments.runners} runner{'s' * (arguments.runners > 1)}"
    case += ", clipped" if arguments.clip else ""
    count = cycles(arguments.parameters, arguments.quick)
    if arguments.mode == "plain":
        ms = measure_plain(arguments.parameters, arguments.runners * mlp.BATCH_SIZE, arguments.clip, count)
    else:
        ms = measure_manager(arguments, case, count)
    common.emit({"inner": "ours"}.get(arguments.mode, arguments.mode), case, "cycle", ms, "ms")


if __name__ == "__main__":
    main()
