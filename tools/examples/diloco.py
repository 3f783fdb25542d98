"""DiLoCo: machines that train alone for many steps, then average what these have changed.

Each machine has a manager, and an inner optimizer that makes --inner-steps local steps. What these have changed in the
parameters is averaged over the machines; an outer optimizer, SGD with Nesterov momentum, takes that mean for a gradient
(Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023, algorithm 1).

Over torch.distributed, started by accelmgr spawn or torchrun, once on each machine:

    accelmgr spawn --nnodes 2 --node-rank 0 --nprocs 1 --rendezvous HOST:29400 -- diloco.py

Over hivemind, without a launcher: the first peer prints its address, the others take it.

    python diloco.py --peers 2 --peer 0
    python diloco.py --peers 2 --peer 1 --initial-peers ADDRESS

A peer that finds no other within --timeout seconds makes the outer step with its own change. Over torch.distributed the
loss of a machine ends the run.

All machines wait for each other in each average. Where machines come and go, or links are slow, see volunteer.py.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from licence_gpt import Gpt, Sequences, held_out_loss

import accelmgr

Average = Callable[[], int]  # Replaces tensors by their means over all machines. Returns how many took part.


@contextlib.contextmanager
def over_torch(tensors: list[torch.Tensor]) -> Iterator[Average]:
    def average() -> int:
        for work in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
            work.wait()
        for tensor in tensors:
            tensor.div_(dist.get_world_size())
        return dist.get_world_size()

    yield average


@contextlib.contextmanager
def over_hivemind(tensors: list[torch.Tensor], arguments: argparse.Namespace) -> Iterator[Average]:
    multiprocessing.set_start_method("fork", force=True)  # hivemind needs it; not the default since Python 3.14.
    import hivemind

    local = {"host_maddrs": [arguments.listen], "use_relay": False, "use_auto_relay": False}
    times = {"min_matchmaking_time": 2.0, "request_timeout": 1.0, "next_chunk_timeout": arguments.timeout}
    dht = hivemind.DHT(initial_peers=arguments.initial_peers, start=True, **local)
    group = {"prefix": "diloco", "target_group_size": arguments.peers, "allow_state_sharing": False}
    averager = hivemind.DecentralizedAverager(tensors, dht, start=True, **group, **times)
    print(*dht.get_visible_maddrs(), flush=True)

    def average() -> int:
        try:
            return len(averager.step(timeout=arguments.timeout))
        except Exception as error:  # hivemind has many for a round that failed.
            print(f"rank {arguments.peer}: alone in this round: {error!r}", flush=True)
            return 1

    try:
        yield average
    finally:
        averager.shutdown()
        dht.shutdown()


def train(arguments: argparse.Namespace, rank: int, size: int, model: Gpt) -> None:
    outer_parameters = [value.detach().clone() for value in model.parameters()]
    changes = [torch.zeros_like(value) for value in outer_parameters]
    for value, change in zip(outer_parameters, changes, strict=True):
        value.grad = change
    outer = torch.optim.SGD(outer_parameters, lr=arguments.outer_rate, momentum=0.9, nesterov=True)
    data = Sequences(1 << 40, arguments.context)
    share = torch.utils.data.Subset(data, range(rank, len(data), size))
    sizes = {"nprocs": arguments.runners, "batch_size_per_device": arguments.batch_size}
    # A peer that was alone in a round has other outer parameters. Averaging these too brings it back.
    averaging = over_hivemind(changes + outer_parameters, arguments) if arguments.peers else over_torch(changes)
    with averaging as average, accelmgr.Manager(model, share, **sizes) as manager:
        inner = torch.optim.AdamW(model.parameters(), lr=arguments.inner_rate)
        for number in range(1, arguments.rounds + 1):
            *_, result = manager.steps(arguments.inner_steps, optimizer=inner)  # Then the parameters are here.
            with torch.no_grad():
                for change, before, after in zip(changes, outer_parameters, model.parameters(), strict=True):
                    torch.sub(before, after, out=change)
                machines = average()
                outer.step()
                for parameter, value in zip(model.parameters(), outer_parameters, strict=True):
                    parameter.copy_(value)
            print(f"rank {rank}: round {number}, machines {machines}, loss {result.loss:.6f}", flush=True)
    print(f"rank {rank}: held-out loss {held_out_loss(model, arguments.context):.6f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--inner-steps", type=int, default=50, help="of each machine in a round")
    parser.add_argument("--inner-rate", type=float, default=2e-3, help="learning rate of AdamW")
    parser.add_argument("--outer-rate", type=float, default=0.7, help="learning rate of SGD")
    parser.add_argument("--runners", type=int, default=2, help="on this machine")
    parser.add_argument("--batch-size", type=int, default=8, help="sequences of each runner in a step")
    parser.add_argument("--peers", type=int, help="average over hivemind; so many machines make a group")
    parser.add_argument("--peer", type=int, default=0, help="number of this one, from 0: which data it has")
    parser.add_argument("--initial-peers", nargs="*", default=[], metavar="ADDRESS")
    parser.add_argument("--listen", default="/ip4/127.0.0.1/tcp/0", help="address of this peer")
    parser.add_argument("--timeout", type=float, default=60, help="seconds to look for other peers")
    for name, value in (("layers", 4), ("width", 128), ("context", 128)):
        parser.add_argument(f"--{name}", type=int, default=value)
    arguments = parser.parse_args()
    torch.manual_seed(0)  # All machines begin with the same parameters.
    model = Gpt(arguments.layers, arguments.width, heads=4, context=arguments.context)
    if arguments.peers:
        train(arguments, arguments.peer, arguments.peers, model)
    else:
        dist.init_process_group("gloo")
        train(arguments, dist.get_rank(), dist.get_world_size(), model)


if __name__ == "__main__":
    main()
