"""accelmgr.Manager with one runner on a GPU in its turn of `tools/bench/gpu`. Prints the contract's lines.

usage: gpu_manager.py [--device cuda|cpu] [--model small|tiny] [--graphs | --bf16-slab]
                      [--optimizer | --inner [--sync-every N]] [--quick]
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).parent / "peers"))

import common
import gpt2
import torch
from gpu_step import WARMUP_CYCLES, cycles

import accelmgr


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--model", default="small", choices=list(gpt2.SHAPES))
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--graphs", action="store_true", help="micro-batches are CUDA graphs")
    how.add_argument("--bf16-slab", action="store_true", help="the device rounds gradients to bfloat16")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--optimizer", action="store_true", help="AdamW on the host, in each cycle")
    where.add_argument("--inner", action="store_true", help="AdamW on the device, in each cycle")
    parser.add_argument("--sync-every", type=int, default=0, metavar="N", help="inner steps; 0: no sync")
    parser.add_argument("--quick", action="store_true", help="fewer cycles")
    arguments = parser.parse_args()
    batch_size = gpt2.SHAPES[arguments.model].batch_size
    losses: list[float] = []
    model = gpt2.make_model(arguments.model)
    with accelmgr.Manager(
        model,
        gpt2.Texts(arguments.model),
        nprocs=1,
        batch_size_per_device=batch_size,
        prefetch=4 * batch_size,
        device=arguments.device,
        runners__autocast="bf16",
        runners__cuda_graph="auto" if arguments.graphs else "off",
        gradients__slab_dtype="bf16" if arguments.bf16_slab else "parameters",
        deterministic=False,  # As in the peers.
        step_timeout=300,
    ) as manager:
        has_optimizer = arguments.optimizer or arguments.inner
        optimizer = torch.optim.AdamW(model.parameters(), fused=True) if has_optimizer else None
        phases: dict[str, list[float]] = {"compute": [], "reduce": [], "wait": [], "optimizer": []}

        def cycle() -> None:
            result = manager.step(optimizer=optimizer) if arguments.inner else manager.step(accumulate=False)
            result.raise_for_status()
            begin = time.perf_counter_ns()
            if arguments.inner and arguments.sync_every and (len(losses) + 1) % arguments.sync_every == 0:
                manager.sync()
            elif arguments.optimizer:
                optimizer.step()
            phases["optimizer"].append((time.perf_counter_ns() - begin) / 1e6)
            for phase in ("compute", "reduce", "wait"):
                phases[phase].append(getattr(result, f"{phase}_ms"))
            losses.append(result.loss)

        step_ms = common.time_cycles(cycle, WARMUP_CYCLES, cycles(arguments.quick))
        start_ms = manager.statistics().runners[0].start_ms
    ways = {
        "graphs": arguments.graphs,
        "bf16_slab": arguments.bf16_slab,
        "optimizer": arguments.optimizer,
        "inner": arguments.inner,
        f"sync_{arguments.sync_every}": arguments.sync_every > 0,
    }
    name = "_".join(["ours", *(way for way, is_on in ways.items() if is_on)])
    common.emit(name, arguments.model, "step", step_ms, "ms")
    common.emit(name, arguments.model, "start", start_ms, "ms")
    for phase, times in phases.items():
        common.emit(name, arguments.model, phase, statistics.median(times[WARMUP_CYCLES:]), "ms")
    common.emit(name, arguments.model, "first_loss", losses[0], "nats")


if __name__ == "__main__":
    main()
