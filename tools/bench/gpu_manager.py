"""accelmgr.Manager with one runner on a GPU in its turn of `tools/bench/gpu`. Prints the contract's lines.

usage: gpu_manager.py [--device cuda|cpu] [--model small|tiny] [--graphs | --overlap] [--quick]
"""

from __future__ import annotations

import argparse
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent / "peers"))

import common
import gpt2
from gpu_step import WARMUP_CYCLES, cycles

import accelmgr


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--model", default="small", choices=list(gpt2.SHAPES))
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--graphs", action="store_true", help="micro-batches are CUDA graphs")
    how.add_argument("--overlap", action="store_true", help="layers compute while parameters of the next come")
    parser.add_argument("--quick", action="store_true", help="fewer cycles")
    arguments = parser.parse_args()
    batch_size = gpt2.SHAPES[arguments.model].batch_size
    losses: list[float] = []
    with accelmgr.Manager(
        gpt2.make_model(arguments.model),
        gpt2.Texts(arguments.model),
        nprocs=1,
        batch_size_per_device=batch_size,
        prefetch=4 * batch_size,
        device=arguments.device,
        runners__autocast="bf16",
        runners__cuda_graph="auto" if arguments.graphs else "off",
        runners__overlap_parameters=arguments.overlap,
        deterministic=False,  # As in the peers.
        step_timeout=300,
    ) as manager:

        def cycle() -> None:
            result = manager.step(accumulate=False)
            result.raise_for_status()
            losses.append(result.loss)

        time = common.time_cycles(cycle, WARMUP_CYCLES, cycles(arguments.quick))
    name = "ours_graphs" if arguments.graphs else "ours_overlap" if arguments.overlap else "ours"
    common.emit(name, arguments.model, "step", time, "ms")
    common.emit(name, arguments.model, "first_loss", losses[0], "nats")


if __name__ == "__main__":
    main()
