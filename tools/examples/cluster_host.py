"""One of several machines that train one model: a manager on each, whose gradients torch.distributed averages.

Start it on each machine; 0 is the first machine and HOST its address:

    torchrun --nnodes 2 --node-rank 0 --nproc-per-node 1 --master-addr HOST --master-port 29400 cluster_host.py
    accelmgr spawn --nnodes 2 --node-rank 0 --nprocs 1 --rendezvous HOST:29400 -- cluster_host.py
    MASTER_ADDR=HOST MASTER_PORT=29400 srun --nodes 2 --ntasks-per-node 1 python cluster_host.py     # starts it on all

A step: the runners of each machine compute their mean gradient into the session; gloo averages it there, in place,
with those of the other machines; each machine steps its own optimizer with the same mean. A machine with more runners
weighs more. All begin with the parameters of rank 0.

A machine is lost if it dies, or does not come to the averaging within --timeout seconds. With `--on-host-loss end` the
others then fail. With `shrink` they go on without it and its share of the data; the step that it was lost in is left
out. The loss of rank 0, of the machine that holds the store (HOST), or of another machine while they meet again ends
the run in any case. So does a launcher that ends all machines after the first failure: `accelmgr spawn` always, srun
without `--no-kill --kill-on-bad-exit=0`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
from collections.abc import Sequence

import torch
import torch.distributed as dist
from licence_gpt import Gpt, Sequences, held_out_loss

import accelmgr


class HostLost(Exception):
    """A machine has died or is late; the text says how that was noticed."""


class Hosts:
    """The machines that average. `members` are their ranks, in the order of the present process group."""

    def __init__(self, start_timeout_s: float, timeout_s: float) -> None:
        if "RANK" not in os.environ and "SLURM_PROCID" in os.environ:  # srun has started this process itself.
            os.environ |= {"RANK": os.environ["SLURM_PROCID"], "WORLD_SIZE": os.environ["SLURM_NTASKS"]}
        self.start_timeout, self.timeout = (datetime.timedelta(seconds=value) for value in (start_timeout_s, timeout_s))
        self._store, self.rank, size = next(dist.rendezvous("env://", timeout=self.start_timeout))
        self.members = list(range(size))

    def meet(self) -> None:
        """Waits until all machines are ready to train."""
        self._store.set(f"ready {self.rank}", "")
        self._store.wait([f"ready {member}" for member in self.members], self.start_timeout)
        self._join()

    def _join(self) -> None:
        self._lost = dist.PrefixStore(f"lost/{self.members}", self._store)
        store = dist.PrefixStore(f"group/{self.members}", self._store)
        rank, size = self.members.index(self.rank), len(self.members)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=self.timeout)

    def average(self, tensors: Sequence[torch.Tensor], weight: float) -> None:
        """Replaces tensors by their weighted means over all machines. After HostLost they have no meaning."""
        total = torch.tensor(float(weight))
        for tensor in tensors:
            tensor.mul_(weight)
        error = None
        for work in [dist.all_reduce(tensor, async_op=True) for tensor in (total, *tensors)]:
            try:
                work.wait()
            except RuntimeError as failed:  # Waits for the others too: until then gloo may write to their tensors.
                error = error or failed
        if error:
            raise HostLost(str(error)) from error
        for tensor in tensors:
            tensor.div_(total)

    def copy_from_first(self, tensors: Sequence[torch.Tensor], state: object) -> object:
        """Overwrites the tensors with those of the first machine. Returns its `state`."""
        for tensor in tensors:
            dist.broadcast(tensor, src=0)
        states = [state]
        dist.broadcast_object_list(states, src=0)
        return states[0]

    def shrink(self) -> None:
        """Makes a group of the machines that are left. Rank 0 says which: those that report to it in time.

        gloo notices a death at once on some machines, on others when their next averaging times out. So rank 0 waits
        for two timeouts, or until all have reported but the one that must be lost.
        """
        if self.rank == 0:
            left = [0]
            try:
                while len(left) < len(self.members) - 1:
                    self._lost.wait([f"report {len(left)}"], 2 * self.timeout)
                    left.append(int(self._lost.get(f"report {len(left)}")))
            except dist.DistStoreError:
                pass  # Nobody else has reported in time.
            self._lost.set("left", json.dumps(sorted(left)))
        else:
            self._lost.set(f"report {self._lost.add('reports', 1)}", str(self.rank))
            self._lost.wait(["left"], 4 * self.timeout)
        self.members = json.loads(self._lost.get("left"))
        if self.rank not in self.members:
            raise HostLost(f"rank {self.rank} was late; ranks {self.members} go on without it")
        dist.destroy_process_group()
        self._join()


def train(arguments: argparse.Namespace, hosts: Hosts, model: Gpt, manager: accelmgr.Manager) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.learning_rate)
    parameters, gradients = [value.data for value in model.parameters()], manager.get_aggregated_gradients()
    hosts.meet()
    hosts.copy_from_first(parameters, None)
    step = 0
    while step < arguments.steps:
        result = manager.step(accumulate=False)
        result.raise_for_status()
        loss = torch.tensor(result.loss)
        try:
            hosts.average([loss, *gradients], weight=result.samples)
        except HostLost as error:
            if arguments.on_host_loss == "end":
                raise
            hosts.shrink()
            print(f"rank {hosts.rank}: hosts {hosts.members} go on: {error}", flush=True)
            # Some of those that are left may have made the step. All go on from where the first one is.
            step, state = hosts.copy_from_first(parameters, (step, optimizer.state_dict()))
            optimizer.load_state_dict(state)
            continue
        optimizer.step()
        step += 1
        print(f"rank {hosts.rank}: step {step}, hosts {len(hosts.members)}, loss {loss:.6f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--runners", type=int, default=2, help="on this machine")
    parser.add_argument("--batch-size", type=int, default=8, help="sequences of each runner in a step")
    parser.add_argument("--learning-rate", type=float, default=5e-3)
    parser.add_argument("--on-host-loss", choices=["end", "shrink"], default="end")
    parser.add_argument("--start-timeout", type=float, default=300, help="seconds to wait until all machines are ready")
    parser.add_argument("--timeout", type=float, default=60, help="seconds after which a machine that is late is lost")
    for name, value in (("layers", 4), ("width", 128), ("context", 128)):
        parser.add_argument(f"--{name}", type=int, default=value)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    model = Gpt(arguments.layers, arguments.width, heads=4, context=arguments.context)
    hosts = Hosts(arguments.start_timeout, arguments.timeout)
    # Element i is for machine i % machines. There are enough elements, so that no machine ends before the others.
    data = Sequences(1 << 40, arguments.context)
    share = torch.utils.data.Subset(data, range(hosts.rank, len(data), len(hosts.members)))
    sizes = {"nprocs": arguments.runners, "batch_size_per_device": arguments.batch_size}
    with accelmgr.Manager(model, share, **sizes) as manager:
        try:
            train(arguments, hosts, model, manager)
        except (HostLost, dist.DistError) as error:
            sys.exit(f"rank {hosts.rank}: a host is lost: {error}")
    print(f"rank {hosts.rank}: held-out loss {held_out_loss(model, arguments.context):.6f}", flush=True)


if __name__ == "__main__":
    main()
