"""A peer of `tools/bench/run swarm`: a manager whose runner computes for a given time, and its place in a swarm.

usage: swarm_peer.py --log FILE --compute-ms MS --millions N [--swarm RUN@HOST:PORT,... --every H] [--seed S]

Without --swarm it makes the same steps alone. Each line of the log is a JSON object with the key `at`, a time of
time.monotonic(), and one of

    start        the module is imported
    sizes        of the parameters
    step         it has been made, and merged and offered what was due; `ms` since the one before
    round        the swarm's, which it has heard of: `participants`, `digest`, `blocks` of the next one, `lineage`;
                 `courier_s`, the seconds of a core that the courier has needed so far
    merged       a round's outer parameters; `took_part`: its own change is in them
    waiting_for  why there is no round

It ends with SIGTERM.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import signal
import time
from typing import Any, TextIO

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import nn

import accelmgr
import accelmgr.outer

WIDTH = 512
SAMPLES = 8
RATE = 1e-4


class _Until(torch.autograd.Function):
    """The identity. Its backward waits until `end`, a time of time.monotonic()."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, end: float) -> torch.Tensor:
        ctx.end = end
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, None]:
        time.sleep(max(0.0, ctx.end - time.monotonic()))
        return None, None


class Paced(nn.Module):
    """A perceptron on a device with a pace of its own: forward and backward take `seconds` together, or longer if the
    processor needs longer.
    """

    def __init__(self, millions: float, seconds: float) -> None:
        super().__init__()
        layers = max(1, round(millions * 1e6 / WIDTH**2))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.seconds = seconds

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        # The first in forward, so the last in backward.
        x = _Until.apply(x.detach().requires_grad_(), time.monotonic() + self.seconds)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return nn.functional.mse_loss(x, y)


class Data(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Elements of one peer."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __len__(self) -> int:
        return 1 << 40

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(WIDTH, generator=torch.Generator().manual_seed(self.seed * 1_000_003 + index))
        return x, torch.sin(3 * x)


class Watched(accelmgr.outer.DiLoCo):
    """Writes down which merges have this peer's own change in them."""

    log: Log

    def _merge(self, message: dict[str, Any]) -> None:
        super()._merge(message)
        if message["merge"]:
            lineage, number = message["stands"] or ("", 0)
            self.log.write(merged=number, lineage=lineage, took_part=all(part for _, part in message["merge"]))


def processor_s(pid: int) -> float:
    """Seconds of a core that a process has needed."""
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


class Log:
    """A line for each thing that happens."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._status: tuple[Any, ...] = ()
        self._waiting_for = ""

    def write(self, **fields: Any) -> None:
        self._file.write(json.dumps({"at": round(time.monotonic(), 4), **fields}) + "\n")
        self._file.flush()

    def write_status(self, outer: accelmgr.outer.DiLoCo) -> None:
        status = outer._status
        stands = status.lineage, status.round
        if stands != self._status:
            self._status = stands
            self.write(
                round=status.round,
                lineage=status.lineage,
                participants=status.participants,
                digest=status.digest[:16],
                blocks=status.blocks,
                courier_s=processor_s(outer.courier_pid),
            )
        if outer.waiting_for != self._waiting_for:
            self._waiting_for = outer.waiting_for
            self.write(waiting_for=outer.waiting_for)


def train(arguments: argparse.Namespace, log: Log) -> None:
    """Until SIGTERM has come."""
    ends: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: ends.append(number))
    torch.manual_seed(0)
    model = Paced(arguments.millions, arguments.compute_ms / 1e3)
    data = Data(arguments.seed)
    with accelmgr.Manager(
        model,
        data,
        nprocs=1,
        batch_size_per_device=SAMPLES,
        start_method="fork",
        refresh="never",
        runners={"threads": 1},
    ) as manager:
        inner = torch.optim.AdamW(model.parameters(), lr=RATE)
        outer = None
        if arguments.swarm:
            outer = Watched(manager, arguments.swarm, arguments.every)
            outer.log = log
            log.write(sizes=[each.numel() for each in model.parameters()])
        begin = time.perf_counter()
        for result in manager.steps(optimizer=inner):
            if outer is not None:
                outer.step(result)
                log.write_status(outer)
            now = time.perf_counter()
            log.write(step=result.step, ms=round(1e3 * (now - begin), 3))
            begin = now
            if ends:
                break
        if outer is not None:
            outer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--log", type=pathlib.Path, required=True)
    parser.add_argument("--compute-ms", type=float, required=True, help="of forward and backward together")
    parser.add_argument("--millions", type=float, required=True, help="of parameters")
    parser.add_argument("--swarm", help="as DiLoCo has it")
    parser.add_argument("--every", type=int, default=100, help="inner steps from one round to the next")
    parser.add_argument("--seed", type=int, default=0, help="of the data")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with arguments.log.open("w") as file:
        log = Log(file)
        log.write(start=os.getpid())
        train(arguments, log)


if __name__ == "__main__":
    main()
