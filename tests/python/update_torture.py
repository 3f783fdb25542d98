"""Kills, stops and interrupts while the session updates parameters, and checks that no update is lost, doubled or torn.

python update_torture.py 600 17: for ten minutes, with seeds from 17 on. Each draws a run and what happens to it. The
team of an owned manager has the same size in the same steps in both runs, since sums of other teams have other bits.
For the same reason hosts of a service, which are killed, make inner steps alone.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pathlib
import random
import select
import signal
import tempfile
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
from harm import Harm, insist, repeat
from services import Service
from test_session_updates import copies, halves, states

import accelmgr

STEPS = 60
RUNNERS = 3
MODELS: list[dict[str, Any]] = [
    {"kind": "mlp", "mlp": {"input_size": 16, "hidden_size": 32}},
    {"kind": "mlp", "mlp": {"input_size": 16, "hidden_size": 300}},
    {"kind": "gpt", "gpt": {"layers": 1, "width": 32, "heads": 2, "context": 16, "vocabulary": 64}},
]
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
}
ONCE = "load_parameters data forward backward vote voted publish published close".split()
OFTEN = "gradient_capture undo_saved in_flight reduced chunk update_saved update_in_flight updated".split()
"""Phases of a step that a process reaches once and often in it."""
KINDS = ["inner", "inner", "inner", "host", "write", "load"]
CALLS = ["one", "several", "pending"]


def faults(seed: int, ranks: list[str]) -> list[str]:
    """Kills of runners and their replacements in each phase, and of the manager."""
    chances = dict.fromkeys(ONCE, 0.004) | dict.fromkeys(OFTEN, 0.0004)
    times = {"any": 1, "manager": 50}  # The manager reaches them where it finishes the slice of a dead runner.
    return [
        f"rank={rank} generation=any phase={phase} probability={chance * times[rank]} seed={seed + number} fault=kill"
        for rank in ranks
        for number, (phase, chance) in enumerate(chances.items())
        if (rank, phase) != ("manager", "data")  # It reaches that before it has started.
    ]


class Plan:
    """What a seed draws, but for harm."""

    def __init__(self, seed: int, steps: int, runners: int | None, is_service: bool | None) -> None:
        chance = random.Random(seed)
        self.seed, self.steps = seed, steps
        self.runners = runners or chance.randint(1, RUNNERS)
        self.is_service = chance.random() < 0.4 if is_service is None else is_service
        self.model, self._optimizer = chance.choice(MODELS), chance.choice(list(OPTIMIZERS))
        self._has_groups, self.clip = chance.random() < 0.5, chance.choice([None, 0.05])
        kinds = ["inner"] if self.is_service else [*KINDS, *([] if runners else ["resize"])]
        self.parts: list[tuple[int, str, str, int]] = []
        """Until which step, of what kind, by which call, and a number: of runners, and for the learning rate."""
        until = 0
        while until < steps:
            until = min(until + chance.randint(1, 8), steps)
            self.parts.append((until, chance.choice(kinds), chance.choice(CALLS), chance.randint(1, RUNNERS)))

    def optimizer_of(self, manager: accelmgr.Manager) -> torch.optim.Optimizer:
        parameters = manager.parameters()
        return OPTIMIZERS[self._optimizer](halves(parameters) if self._has_groups else parameters)

    def settings(self, is_harmed: bool) -> dict[str, Any]:
        ranks = (["any"] if self.is_service else ["any", "manager"]) if is_harmed else []
        return {
            "nprocs": self.runners,
            "batch_size_per_device": 4,
            "step_timeout": 60,
            "runners": {
                "threads": 1,
                "max_runners": RUNNERS,
                "restart_backoff": 0,
                "restarts_per_window": 0,
                "max_restarts": 1_000_000,
            },
            "model": self.model,
            "data": {"kind": "synthetic", "sequence_length": 16},
            "faults": faults(self.seed, ranks),
        }

    def __str__(self) -> str:
        kind = "service" if self.is_service else "owned"
        groups, clip = "groups" if self._has_groups else "one group", f"clip {self.clip}"
        return f"{kind}, {self.model['kind']}, {self.runners} runners, {self._optimizer}, {groups}, {clip}"


class Host:
    """Makes the steps of a plan with a manager."""

    def __init__(self, plan: Plan, manager: accelmgr.Manager, harm: Harm | None) -> None:
        self._plan, self._manager, self._harm = plan, manager, harm
        self._optimizer = plan.optimizer_of(manager)
        self.losses: dict[int, float] = {}
        self.interruptions = 0

    def go(self, until: int) -> None:
        if (pending := self._manager.pending_steps) is not None:  # Of a host of the service that was killed.
            with contextlib.suppress(accelmgr.Error):
                pending.result()
        for end, kind, call, number in self._plan.parts:
            end = min(end, until)
            if self._reached() >= end:
                continue
            for group in self._optimizer.param_groups:
                group["lr"] = 0.02 / number
            if kind == "write":
                with torch.no_grad():
                    self._manager.parameters()[0].mul_(0.9)
            elif kind == "load":
                saved = self._optimizer.state_dict()
                self._optimizer = self._plan.optimizer_of(self._manager)
                self._optimizer.load_state_dict(saved)
            elif kind == "resize":
                self._insist(functools.partial(self._manager.resize, number))
            if kind == "host":
                self._by_host(end)
            else:
                self._insist(functools.partial(self._inner, call, end), may_interrupt=call != "pending")
        self._insist(self._manager.sync)

    def result(self) -> list[torch.Tensor]:
        """Parameters, the optimizer's state, and how many updates each parameter has had."""
        updates = torch.tensor(self._manager._handle.updates())
        return [*copies(self._manager), *states(self._optimizer), updates]

    def _insist(self, call: Callable[[], object], may_interrupt: bool = True) -> None:
        self.interruptions += insist(self._manager, self._harm, call, may_interrupt)

    def _reached(self) -> int:
        return self._manager.statistics().steps

    def _note(self, result: accelmgr.StepResult | None) -> None:
        if result is not None and result.counted:
            self.losses[result.step] = result.loss

    def _by_host(self, until: int) -> None:
        def step() -> None:
            result = self._manager.step(accumulate=False)
            self._note(result)
            if not result.counted:
                result.raise_for_status()

        while self._reached() < until:
            self._insist(step, may_interrupt=False)
            if self._plan.clip is not None:
                torch.nn.utils.clip_grad_norm_(self._manager.parameters(), self._plan.clip)
            self._optimizer.step()

    def _inner(self, call: str, until: int) -> None:
        asks = {"optimizer": self._optimizer, "clip_grad_norm": self._plan.clip}
        try:
            if call == "one":
                while self._reached() < until:
                    result = self._manager.step(**asks)
                    self._note(result)
                    if not result.counted:
                        result.raise_for_status()
            elif call == "several":
                for result in self._manager.steps(until - self._reached(), **asks):
                    self._note(result)
            elif self._reached() < until:
                pending = self._manager.begin_steps(until - self._reached(), **asks)
                with contextlib.suppress(accelmgr.Error):
                    pending.result()
                for result in pending.results():
                    self._note(result)
                pending.result()
        except BaseException as error:
            self._note(getattr(error, "step_result", None))
            raise


class Run:
    """What a plan comes to."""

    def __init__(self, plan: Plan, is_harmed: bool) -> None:
        self.plan, self._is_harmed = plan, is_harmed
        self.losses: dict[int, float] = {}
        self.unseen = 0  # So many losses may be missing: an interrupt or a kill came before they were told.
        self.lost = 0  # Runners and fork servers.
        if plan.is_service and is_harmed:
            with tempfile.TemporaryDirectory() as folder:
                self._by_hosts(pathlib.Path(folder))
        else:
            with accelmgr.Manager(config=plan.settings(is_harmed)) as manager:
                harm = Harm(plan.seed) if is_harmed else None
                self._end(Host(plan, manager, harm), manager)

    def _end(self, host: Host, manager: accelmgr.Manager) -> None:
        host.go(self.plan.steps)
        self.result, self.losses = host.result(), self.losses | host.losses
        self.unseen += host.interruptions
        self.lost = manager.statistics().losses

    def _by_hosts(self, folder: pathlib.Path) -> None:
        with Service(folder, json.dumps(self.plan.settings(self._is_harmed))) as service:
            self._harm = Harm(self.plan.seed, spared=[service.process.pid])
            with accelmgr.observe(service.socket) as observer:
                while observer.statistics().steps < self.plan.steps - 2:
                    self._let_a_host_live(service, observer)
                with accelmgr.attach(service.socket, timeout=60) as manager:
                    self._end(Host(self.plan, manager, None), manager)

    def _let_a_host_live(self, service: Service, observer: accelmgr.Observer) -> None:
        self.unseen += 1
        with started(functools.partial(self._live, service)) as is_over:
            while not is_over():
                self._harm.begin(may_interrupt=False)
                self._note_losses(observer)
                self._harm.end()
        self._note_losses(observer)

    def _note_losses(self, observer: accelmgr.Observer) -> None:
        while (seen := observer.next_step(0.02)) is not None:
            if seen.counted:
                self.losses[seen.step] = seen.loss

    def _live(self, service: Service) -> None:
        with accelmgr.attach(service.socket, timeout=60) as manager:
            assert manager.unfinished == ""
            harm = Harm(f"{self.plan.seed} {manager.statistics().steps}", ("nothing", "interrupt"))
            Host(self.plan, manager, harm).go(self.plan.steps - 2)


@contextlib.contextmanager
def started(body: Callable[[], None]) -> Iterator[Callable[[], bool]]:
    """A fork that does it. Yields whether it has ended; raises what it has raised."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            body()
        except BaseException:
            os.write(writer, traceback.format_exc().encode()[-60_000:])
        finally:
            os._exit(0)
    os.close(writer)
    try:
        yield lambda: bool(select.select([reader], [], [], 0)[0])
        with os.fdopen(reader, "rb", closefd=False) as said:
            assert not (text := said.read().decode()), text
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):  # descendants() reaps, too.
            os.waitpid(pid, 0)
        os.close(reader)


def check(seed: int, steps: int = STEPS, runners: int | None = None, is_service: bool | None = None) -> Run:
    """Makes both runs of the seed and compares them. Returns the one with harm."""
    plan = Plan(seed, steps, runners, is_service)
    wanted, harmed = Run(plan, is_harmed=False), Run(plan, is_harmed=True)
    run = f"seed {seed}: {plan}, {harmed.lost} lost"
    assert len(harmed.result) == len(wanted.result), run
    differing = [i for i, pair in enumerate(zip(harmed.result, wanted.result, strict=True)) if not torch.equal(*pair)]
    assert not differing, f"{run}: tensors {differing} of {len(wanted.result)} differ"
    assert list(wanted.losses) == list(range(1, steps + 1)), run
    other = {step: loss for step, loss in harmed.losses.items() if loss != wanted.losses[step]}
    assert not other, f"{run}: other losses: {other}"
    assert steps - len(harmed.losses) <= harmed.unseen, run
    return harmed


def described(seed: int) -> str:
    run = check(seed)
    return f"{run.plan}, {run.lost} lost"


if __name__ == "__main__":
    repeat(described)
