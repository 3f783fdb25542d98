"""Peers of accelmgr.outer in this process, each with a manager, a runner and a courier; and a simulation of them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

import accelmgr
import accelmgr.outer

BOUND_S = 120
EVERY = 3


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 300), nn.Linear(300, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x, y = x.to(self.first.weight.dtype), y.to(self.first.weight.dtype)
        return nn.functional.mse_loss(self.second(torch.tanh(self.first(x))), y)


class Share(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Elements of one peer."""

    def __init__(self, peer: int) -> None:
        self.peer = peer

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(6, generator=torch.Generator().manual_seed(1000 * self.peer + index))
        return x, torch.sin(x.sum())[None] + 0.1 * self.peer


def model_of(seed: int) -> Net:
    torch.manual_seed(seed)
    return Net()


def flat(values: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([each.flatten() for each in values])


class Peer:
    """A manager and its place in the swarm."""

    def __init__(
        self,
        peer: int,
        swarm: str,
        seed: int = 0,
        inner: bool = False,
        dataset: torch.utils.data.Dataset[Any] | None = None,
        dtype: torch.dtype = torch.float32,
        **options: object,
    ) -> None:
        self.model = model_of(seed).to(dtype)
        self.manager = accelmgr.Manager(self.model, dataset or Share(peer), nprocs=1, batch_size_per_device=4)
        self.inner = inner
        self.optimizer = torch.optim.SGD(self.manager.parameters(), lr=0.01)
        self.outer = accelmgr.outer.DiLoCo(self.manager, swarm, EVERY, **options)  # type: ignore[arg-type]

    def step(self) -> accelmgr.StepResult:
        if self.inner:
            result = self.manager.step(optimizer=self.optimizer)
        else:
            result = self.manager.step(accumulate=False)
            self.optimizer.step()
        result.raise_for_status()
        self.outer.step(result)
        return result

    def values(self) -> list[torch.Tensor]:
        self.manager.sync()
        return [each.detach().clone() for each in self.manager.parameters()]

    def close(self) -> None:
        self.outer.close()
        self.manager.stop()


@contextlib.contextmanager
def swarm_of(*makers: Callable[[], Peer]) -> Iterator[list[Peer]]:
    with contextlib.ExitStack() as stack:
        peers = []
        for make in makers:
            peers.append(make())
            stack.callback(peers[-1].close)
        yield peers


def wait_until(peers: list[Peer], holds: Callable[[], bool]) -> None:
    """Until this holds, the peers hear their couriers and make no steps."""
    deadline = time.monotonic() + BOUND_S
    while not holds():
        assert time.monotonic() < deadline, [(each.outer.round, each.outer.waiting_for) for each in peers]
        for each in peers:
            each.outer.wait(0.02)


def meet(peers: list[Peer]) -> None:
    """All peers are of one swarm."""
    wait_until(peers, lambda: len({each.outer._status.lineage for each in peers}) == 1 and all_ready(peers))


def all_ready(peers: list[Peer]) -> bool:
    return all(each.outer._status.is_ready and each.outer._merged is not None for each in peers)


def make_round(peers: list[Peer], steps: int = EVERY) -> int:
    """So many steps of each, and the round in which these change the outer parameters."""
    before = max(each.outer.round for each in peers)
    for _ in range(steps):
        for each in peers:
            each.step()
    wait_until(peers, lambda: all(each.outer.round > before and each.outer._offered is None for each in peers))
    return before + 1


def make_round_of_all(peers: list[Peer]) -> None:
    """The first rounds may go without one that has come back: the others have not heard of it yet, and do not wait."""
    deadline = time.monotonic() + BOUND_S  # Rounds take 30 ms, and the others may not ask it for a second.
    while time.monotonic() < deadline:
        make_round(peers)
        if {each.outer.participants for each in peers} == {len(peers)}:
            break
    assert {each.outer.participants for each in peers} == {len(peers)}
    assert len({each.outer.digest for each in peers}) == 1


Round = tuple[int, tuple[int, int]]
"""Steps, and the blocks that are averaged after them."""
WHOLE: Round = (EVERY, (0, 4))


def simulated(rounds: list[Round], peers: int, mix: float, again_before: int | None = None) -> list[list[torch.Tensor]]:
    """The parameters of each peer after these rounds: the algorithm alone, in this process.

    again_before: in this round, counted from 0, data are read from their beginning again.
    """
    models = [model_of(0) for _ in range(peers)]
    outer = [each.detach().clone() for each in models[0].parameters()]
    optimizer = torch.optim.SGD(outer, lr=0.7, momentum=0.9, nesterov=True)
    read = 0
    for number, (steps, blocks) in enumerate(rounds):
        read = 0 if number == again_before else read
        for peer, model in enumerate(models):
            inner = torch.optim.SGD(model.parameters(), lr=0.01)
            for step in range(steps):
                rows = [Share(peer)[4 * (read + step) + row] for row in range(4)]
                loss = model(torch.stack([x for x, _ in rows]), torch.stack([y for _, y in rows]))
                inner.zero_grad()
                loss.backward()
                inner.step()
        read += steps
        values = [[each.detach() for each in model.parameters()] for model in models]
        for index in range(*blocks):
            outer[index].grad = sum(outer[index] - mine[index] for mine in values) / peers
        optimizer.step()
        optimizer.zero_grad()
        for mine in values:
            for index in range(*blocks):
                mine[index].lerp_(outer[index], mix)
    return [[each.detach() for each in model.parameters()] for model in models]
