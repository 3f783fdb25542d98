"""accelmgr.Manager with one XLA runner in its turn of `tools/bench/run xla`. Prints the contract's lines.

usage: xla_manager.py --parameters 1|17 [--quick]
"""

from __future__ import annotations

import argparse
import os
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent / "peers"))

import common
import mlp
from mlp_step import WARMUP_CYCLES, cycles
from python_manager import Net, Resident

import accelmgr


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", required=True, choices=list(mlp.SHAPES["shapes"]), help="millions")
    parser.add_argument("--quick", action="store_true", help="fewer cycles")
    arguments = parser.parse_args()
    model, data = Net(arguments.parameters), Resident(arguments.parameters)
    os.environ["PJRT_NPROC"] = str(mlp.THREADS)
    with accelmgr.Manager(
        model,
        data,
        nprocs=1,
        batch_size_per_device=mlp.BATCH_SIZE,
        prefetch=2 * mlp.BATCH_SIZE,
        device="xla",
        runners={"threads": mlp.THREADS},
    ) as manager:

        def cycle() -> None:
            manager.step(accumulate=False).raise_for_status()

        count = cycles(arguments.parameters, arguments.quick)
        case = arguments.parameters + "M"
        common.emit("ours", case, "cycle", common.time_cycles(cycle, WARMUP_CYCLES, count), "ms")


if __name__ == "__main__":
    main()
