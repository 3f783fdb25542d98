"""A volunteer's machine in a swarm that trains a small GPT: DiLoCo by accelmgr.outer, for which no step waits.

On the first machine, and on each other one with that machine's address:

    python volunteer.py run-7@10.0.0.1:29500

Or with a folder that all machines see: run-7@/mnt/swarm. A machine may come and go at any time.
"""

from __future__ import annotations

import argparse
import pathlib

import torch
from licence_gpt import Gpt, Sequences, held_out_loss

import accelmgr
import accelmgr.outer


def save(outer: accelmgr.outer.DiLoCo, path: pathlib.Path) -> None:
    """A file that is whole at any time, also if several machines write it."""
    part = path.with_name(f"{path.name}.{outer.peer}")
    torch.save(outer.state_dict(), part)
    part.replace(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("swarm", help="RUN@HOST:PORT, RUN@/FOLDER or RUN@p2p")
    parser.add_argument("--rounds", type=int, default=20, help="end when the swarm has made so many")
    parser.add_argument("--every", type=int, default=50, help="inner steps from one round to the next")
    parser.add_argument("--secret-file", type=pathlib.Path, help="its text lets peers in")
    parser.add_argument("--listen", default="", help="HOST:PORT to serve at, where others reach this machine")
    parser.add_argument("--advertise", default="", help="HOST:PORT that they reach, if that is another (a router)")
    parser.add_argument("--state", type=pathlib.Path, help="a file that has the last round: the swarm goes on with it")
    parser.add_argument("--runners", type=int, default=2, help="on this machine")
    parser.add_argument("--batch-size", type=int, default=8, help="sequences of each runner in a step")
    parser.add_argument("--rate", type=float, default=2e-3, help="learning rate of the inner AdamW")
    for name, value in (("layers", 4), ("width", 128), ("context", 128)):
        parser.add_argument(f"--{name}", type=int, default=value)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    model = Gpt(arguments.layers, arguments.width, heads=4, context=arguments.context)
    data = Sequences(1 << 40, arguments.context)
    # Which sequences a machine reads is said by the rounds: no two machines read the same one.
    hold = 3 * arguments.every * arguments.runners * arguments.batch_size
    state = torch.load(arguments.state) if arguments.state and arguments.state.exists() else None
    leased = accelmgr.outer.Leased(data, hold, state)
    network = {"listen": arguments.listen, "advertise": arguments.advertise}
    network["secret"] = arguments.secret_file.read_text().strip() if arguments.secret_file else ""
    with accelmgr.Manager(
        model, leased, nprocs=arguments.runners, batch_size_per_device=arguments.batch_size
    ) as manager:
        inner = torch.optim.AdamW(model.parameters(), lr=arguments.rate)
        with accelmgr.outer.DiLoCo(
            manager, arguments.swarm, arguments.every, data=leased, state=state, **network
        ) as outer:
            seen, address = state["round"] if state else 0, ""
            for result in manager.steps(optimizer=inner):
                outer.step(result)
                if outer.address != address:
                    address = outer.address
                    print(f"others join with {arguments.swarm.partition('@')[0]}@{address}", flush=True)
                if outer.round > seen:
                    seen = outer.round
                    print(
                        f"step {result.step}: round {seen}, {outer.participants} peers, loss {result.loss:.4f}, "
                        f"digest {outer.digest[:12]}",
                        flush=True,
                    )
                    if arguments.state:
                        save(outer, arguments.state)
                if seen >= arguments.rounds:
                    break
                if result.step % 500 == 0 and outer.waiting_for:
                    print(f"step {result.step}: loss {result.loss:.4f}; waiting for {outer.waiting_for}", flush=True)
            outer.wait(10)  # Merges the last round.
    print(f"held-out loss {held_out_loss(model, arguments.context):.4f}", flush=True)


if __name__ == "__main__":
    main()
