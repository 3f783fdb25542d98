"""What parameters take in shared and private memory, in `tools/bench/run frozen`. Prints the contract's lines.

usage: frozen_memory.py [--quick]
"""

from __future__ import annotations

import argparse
import os
import pathlib
import sys

import torch

sys.path.insert(0, str(pathlib.Path(__file__).parent / "peers"))

import common

import accelmgr

MIB = 2**20
RUNNERS = (1, 2, 4)


class Model(torch.nn.Module):
    """Parameters of bfloat16, in 8 tensors, frozen or trained. A runner on the CPU has no copy of either."""

    def __init__(self, mib: int, trained: bool) -> None:
        super().__init__()
        count = mib * MIB // 2 // 8
        values = [torch.ones(count, dtype=torch.bfloat16) for _ in range(8)]
        self.large = torch.nn.ParameterList([torch.nn.Parameter(value, requires_grad=trained) for value in values])
        self.small = torch.nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum((each[:1].float() * self.small).sum() for each in self.large) * x.sum()


def children() -> list[int]:
    """The processes below this one."""
    found = [os.getpid()]
    for pid in found:
        for thread in pathlib.Path(f"/proc/{pid}/task").glob("*/children"):
            found += map(int, thread.read_text().split())
    return found[1:]


def taken() -> tuple[int, int]:
    """Bytes of shared memory, and of private memory of manager, fork server and runners."""
    shared, kib = {}, 0
    for pid in children():
        for entry in pathlib.Path(f"/proc/{pid}/fd").iterdir():
            try:
                if "memfd:" in os.readlink(entry):
                    shared[entry.stat().st_ino] = entry.stat().st_blocks * 512
            except FileNotFoundError:
                continue
        lines = pathlib.Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        kib += sum(int(line.split()[1]) for line in lines if line.startswith("Pss_Anon:"))
    return sum(shared.values()), kib * 1024


def measured(runners: int, mib: int, trained: bool) -> tuple[int, int]:
    options = {"nprocs": runners, "batch_size_per_device": 1, "runners__threads": 1}
    with accelmgr.Manager(Model(mib, trained), [torch.ones(1)] * 3 * runners, **options) as manager:
        for _ in range(3):
            manager.zero_grad()
            manager.step().raise_for_status()
        return taken()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smaller model")
    mib = 64 if parser.parse_args().quick else 512
    for runners in RUNNERS:
        least_shared, least_private = measured(runners, 0, trained=False)
        for kind in ("frozen", "trained"):
            shared, private = measured(runners, mib, trained=kind == "trained")
            case = f"{kind}, {runners} runner{'s' if runners > 1 else ''}"
            common.emit("ours", case, "shared", (shared - least_shared) / (mib * MIB), "copies")
            if kind == "frozen":  # For trained ones, autograd makes gradients there.
                common.emit("ours", case, "private", (private - least_private) / (mib * MIB), "copies")


if __name__ == "__main__":
    main()
