"""Managers as actors of Ray, one on each machine. torch.distributed averages their gradients, as in cluster_host.py.

    pip install ray
    python tools/examples/ray_managers.py --machines 2       # in a cluster, or on this machine alone

Ray starts the actors, spreads them over the machines, and returns what they compute. Each actor reserves a CPU for each
of its runners. An actor that dies ends the run: ray.get() raises ActorDiedError, or what gloo raised in another actor.
"""

from __future__ import annotations

import argparse
import datetime

import ray
import torch
import torch.distributed as dist
from licence_gpt import Gpt, Sequences, held_out_loss

import accelmgr


@ray.remote
class Machine:
    """A host with a manager. Its calls run one after the other, in a process of Ray."""

    def __init__(self, rank: int, arguments: argparse.Namespace) -> None:
        self.rank, self.arguments = rank, arguments
        self.timeout = datetime.timedelta(seconds=arguments.timeout)

    def listen(self) -> tuple[str, int]:
        """Opens the store at which all machines meet. Returns its address."""
        self.store = dist.TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False, timeout=self.timeout)
        return ray.util.get_node_ip_address(), self.store.port

    def join(self, address: tuple[str, int]) -> None:
        store = self.store if self.rank == 0 else dist.TCPStore(*address, timeout=self.timeout)
        size = self.arguments.machines
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=size, timeout=self.timeout)
        torch.manual_seed(0)  # All machines begin with the same parameters.
        arguments, data = self.arguments, Sequences(1 << 40, self.arguments.context)
        self.model = Gpt(arguments.layers, arguments.width, heads=4, context=arguments.context)
        share = torch.utils.data.Subset(data, range(self.rank, len(data), size))
        sizes = {"nprocs": arguments.runners, "batch_size_per_device": arguments.batch_size}
        self.manager = accelmgr.Manager(self.model, share, **sizes)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=arguments.learning_rate)

    def train(self, steps: int) -> list[float]:
        """Makes steps together with the other machines. Returns the loss of each."""
        losses = []
        for _ in range(steps):
            result = self.manager.step(accumulate=False)
            result.raise_for_status()
            losses.append(torch.tensor(result.loss))
            tensors = [losses[-1], *self.manager.get_aggregated_gradients()]
            for work in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
                work.wait()
            for tensor in tensors:
                tensor.div_(dist.get_world_size())
            self.optimizer.step()
        return [loss.item() for loss in losses]

    def finish(self) -> float:
        self.manager.stop()
        return held_out_loss(self.model, self.arguments.context)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machines", type=int, default=2)
    parser.add_argument("--runners", type=int, default=1, help="on each machine")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=8, help="sequences of each runner in a step")
    parser.add_argument("--learning-rate", type=float, default=5e-3)
    parser.add_argument("--timeout", type=float, default=60, help="seconds to wait for another machine")
    for name, value in (("layers", 4), ("width", 128), ("context", 128)):
        parser.add_argument(f"--{name}", type=int, default=value)
    arguments = parser.parse_args()
    ray.init()
    options = {"num_cpus": arguments.runners, "scheduling_strategy": "SPREAD"}
    machines = [Machine.options(**options).remote(rank, arguments) for rank in range(arguments.machines)]
    address = machines[0].listen.remote()
    ray.get([machine.join.remote(address) for machine in machines])
    for begin in range(0, arguments.steps, 20):
        steps = min(20, arguments.steps - begin)
        losses = ray.get([machine.train.remote(steps) for machine in machines])
        print(f"step {begin + steps}: loss {losses[0][-1]:.6f}", flush=True)
    held_out = ray.get([machine.finish.remote() for machine in machines])
    print(f"held-out losses: {', '.join(f'{loss:.6f}' for loss in held_out)}")


if __name__ == "__main__":
    main()
