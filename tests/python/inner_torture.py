"""Kills, stops and interrupts while inner steps are made, and checks that no step is lost, doubled or different.

python inner_torture.py 600 17 fork: for ten minutes, with seeds from 17 on. Each draws a run and what happens to it.
"""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Callable

import torch
from harm import Harm, insist, repeat
from test_inner import Net, assert_same, manager_of

STEPS = 30
KINDS = ["one", "several", "pending", "one", "several", "pending", "host", "sync", "write", "refresh", "resize"]
RUNNERS = 3


class Run:
    """The run of a seed. With harm its steps are inner ones as far as the seed says so, else all are the host's."""

    def __init__(self, seed: int, harm: Harm | None, start_method: str) -> None:
        chance = random.Random(seed)
        self._harm, self._model = harm, Net()
        make = chance.choice([lambda p: torch.optim.AdamW(p, 0.01), lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)])
        self._optimizer = make(self._model.parameters())
        self.calls: list[str] = []
        options = {
            "runners__restart_backoff": 0.001,
            "runners__max_restarts": 10_000,
            "runners__max_runners": RUNNERS,
            "step_timeout": 20,
        }
        with manager_of(self._model, chance.randint(1, RUNNERS), start_method, **options) as self._manager:
            done = 0
            while done < STEPS:
                kind, number = chance.choice(KINDS), chance.randint(1, 3)
                until, clip = min(done + chance.randint(1, 6), STEPS), chance.choice([None, 0.5])
                self.calls.append(kind)
                if kind in ("refresh", "sync"):
                    self._during(getattr(self._manager, kind))
                elif kind == "resize":
                    self._during(functools.partial(self._manager.resize, number))
                elif kind == "write":
                    self._during(self._manager.sync)
                    with torch.no_grad():
                        self._model.head.weight.mul_(0.9)
                else:
                    for group in self._optimizer.param_groups:
                        group["lr"] = 0.01 / number
                    if kind == "host" or harm is None:
                        self._by_host(until, clip)
                    else:
                        self._by_runners(kind, until, clip)
                    done = until
            self._during(self._manager.sync)
        self.result = self._model, self._optimizer

    def _during(self, call: Callable[[], object], may_interrupt: bool = True) -> None:
        insist(self._manager, self._harm, call, may_interrupt)

    def _by_host(self, until: int, clip: float | None) -> None:
        def step() -> None:
            result = self._manager.step()
            if not result.counted:
                result.raise_for_status()

        while self._manager.statistics().steps < until:
            self._optimizer.zero_grad()
            self._during(step, may_interrupt=False)
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(self._model.parameters(), clip)
            self._optimizer.step()

    def _by_runners(self, kind: str, until: int, clip: float | None) -> None:
        asks = {"optimizer": self._optimizer, "clip_grad_norm": clip}
        reached = self._manager.statistics().steps

        def make() -> None:
            nonlocal reached
            self._manager.sync()  # Says what an interrupted call has made.
            reached = self._manager.statistics().steps
            if kind == "one":
                while reached < until:
                    result = self._manager.step(**asks)
                    if not result.counted:
                        result.raise_for_status()
                    reached = result.step
            elif kind == "several":
                for _ in self._manager.steps(until - reached, sync_every=3, **asks):
                    pass
            elif reached < until:
                self._manager.begin_steps(until - reached, **asks).result()

        self._during(make, may_interrupt=kind != "pending")


def check(seed: int) -> str:
    wanted, harmed = Run(seed, None, "fork"), Run(seed, Harm(seed), sys.argv[3])
    assert_same(harmed.result, wanted.result)
    return " ".join(harmed.calls)


if __name__ == "__main__":
    repeat(check)
