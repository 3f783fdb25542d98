"""Inner steps whose update the session makes: of services and built-in models, whose runners can have no optimizer."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch
from interruptions import interrupted_at
from services import PROGRAM, Service

import accelmgr

Make = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


def built_in(hidden_size: int = 300) -> accelmgr.Manager:
    mlp = {"input_size": 16, "hidden_size": hidden_size}
    return accelmgr.Manager("mlp", "synthetic", nprocs=2, batch_size_per_device=4, runners__threads=1, model__mlp=mlp)


def halves(parameters: list[torch.nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": parameters[:2], "lr": 0.02, "weight_decay": 0.1}, {"params": parameters[2:]}]


OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adamw_groups": lambda p: torch.optim.AdamW(halves(p), lr=0.01, betas=(0.8, 0.95)),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd_nesterov": lambda p: torch.optim.SGD(halves(p), lr=0.1, momentum=0.9, nesterov=True),
}


def copies(manager: accelmgr.Manager) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in manager.parameters()]


def states(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [
        value.detach().clone()
        for group in optimizer.param_groups
        for parameter in group["params"]
        for _, value in sorted(optimizer.state[parameter].items())
    ]


def check_close(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


class Twin:
    """The same updates in the host: parameters of its own, and torch's optimizer over them."""

    def __init__(self, manager: accelmgr.Manager, make: Make) -> None:
        self.parameters = [torch.nn.Parameter(value) for value in copies(manager)]
        self.optimizer = make(self.parameters)

    def step(self, manager: accelmgr.Manager, clip_grad_norm: float | None = None) -> torch.Tensor | None:
        norm = None
        for parameter, gradient in zip(self.parameters, manager.get_aggregated_gradients(), strict=True):
            parameter.grad = gradient.clone()
        if clip_grad_norm is not None:
            norm = torch.nn.utils.clip_grad_norm_(self.parameters, clip_grad_norm)
        self.optimizer.step()
        return norm


@pytest.mark.parametrize("clip_grad_norm", [None, 0.05], ids=["plain", "clipped"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_updates_are_those_of_torch(kind: str, clip_grad_norm: float | None) -> None:
    make = OPTIMIZERS[kind]
    with built_in() as manager:
        optimizer, twin = make(manager.parameters()), Twin(manager, make)
        schedulers = [torch.optim.lr_scheduler.CosineAnnealingLR(each, 10) for each in (optimizer, twin.optimizer)]
        for result in manager.steps(8, optimizer=optimizer, clip_grad_norm=clip_grad_norm):
            norm = twin.step(manager, clip_grad_norm)
            assert result.grad_norm == pytest.approx(float(norm) if norm is not None else 0.0, rel=1e-5)
            check_close(copies(manager), [parameter.detach() for parameter in twin.parameters])
            check_close(states(optimizer), states(twin.optimizer))
            for scheduler in schedulers:
                scheduler.step()
        assert manager.synced_step == 8


def test_host_steps_and_a_loaded_state_go_on() -> None:
    make = OPTIMIZERS["adamw_groups"]
    with built_in() as manager:
        optimizer, twin = make(manager.parameters()), Twin(manager, make)

        def both(count: int, inner: bool) -> None:
            for _ in range(count):
                manager.step(optimizer=optimizer) if inner else manager.step(accumulate=False)
                twin.step(manager)
                if not inner:
                    optimizer.step()

        both(2, inner=True)
        both(2, inner=False)
        both(2, inner=True)
        saved = optimizer.state_dict()
        optimizer = make(manager.parameters())
        optimizer.load_state_dict(saved)
        both(2, inner=True)
        check_close(copies(manager), [parameter.detach() for parameter in twin.parameters])
        check_close(states(optimizer), states(twin.optimizer))
        assert float(optimizer.state[manager.parameters()[0]]["step"]) == 8

        fresh = make(manager.parameters())
        manager.step(optimizer=fresh)
        assert float(fresh.state[manager.parameters()[0]]["step"]) == 1


@pytest.mark.parametrize("is_loaded", [False, True], ids=["its first step", "a loaded state"])
def test_a_signal_handler_that_raises_loses_nothing(is_loaded: bool) -> None:
    make = OPTIMIZERS["adamw"]

    def trained(place: int | None) -> tuple[str, list[torch.Tensor]]:
        where = ""
        with built_in(hidden_size=32) as manager:
            optimizer = make(manager.parameters())
            if is_loaded:
                manager.step(optimizer=optimizer)
                state, optimizer = optimizer.state_dict(), make(manager.parameters())
                optimizer.load_state_dict(state)
            if place is not None:
                where, _ = interrupted_at(place, lambda: manager.step(optimizer=optimizer))
            while manager.statistics().steps < 4:
                manager.step(optimizer=optimizer)
            return where, copies(manager) + states(optimizer)

    _, expected = trained(None)
    seen = set()
    for place in range(0, 1000, 13):
        where, found = trained(place)
        if not where:
            break
        seen.add(where)
        assert len(found) == len(expected) and all(map(torch.equal, found, expected)), where
    assert len(seen) > 8


def test_two_optimizers_take_turns() -> None:
    makes = OPTIMIZERS["adamw"], OPTIMIZERS["sgd_nesterov"]
    with built_in() as manager:
        optimizers = [make(manager.parameters()) for make in makes]
        twin = Twin(manager, makes[0])
        twins = [twin.optimizer, makes[1](twin.parameters)]
        for index in (0, 1, 1, 0, 1, 0):
            manager.step(optimizer=optimizers[index]).raise_for_status()
            twin.optimizer = twins[index]
            twin.step(manager)
        check_close(copies(manager), [parameter.detach() for parameter in twin.parameters])
        for ours, theirs in zip(optimizers, twins, strict=True):
            check_close(states(ours), states(theirs))


def test_a_parameter_that_the_optimizer_does_not_have_stays() -> None:
    with built_in() as manager:
        optimizer = torch.optim.AdamW(manager.parameters()[1:])
        before = copies(manager)
        manager.step(optimizer=optimizer).raise_for_status()
        assert torch.equal(copies(manager)[0], before[0])
        assert not torch.equal(copies(manager)[1], before[1])
        assert manager.parameters()[0] not in optimizer.state


def with_a_hook(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(parameters)
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


REFUSED: dict[str, Make] = {
    "Adagrad": torch.optim.Adagrad,
    "amsgrad is set": lambda p: torch.optim.AdamW(p, amsgrad=True),
    "dampening is set": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.1),
    r"shape \[3\] in group 0": lambda p: torch.optim.SGD([*p, torch.nn.Parameter(torch.zeros(3))], lr=0.1),
    "it has hooks": with_a_hook,
}


def test_other_optimizers_and_norms_that_are_none_are_refused() -> None:
    with built_in() as manager:
        before = copies(manager)
        for reason, make in REFUSED.items():
            with pytest.raises(accelmgr.UsageError, match=reason):
                manager.step(optimizer=make(manager.parameters()))
        for norm in (0.0, -1.0, float("nan")):
            with pytest.raises(accelmgr.UsageError, match="it must be above 0"):
                manager.step(optimizer=torch.optim.AdamW(manager.parameters()), clip_grad_norm=norm)
        assert all(map(torch.equal, copies(manager), before))
        assert manager.statistics().steps == 0


def test_a_parameter_that_was_frozen_at_the_start_is_named(tmp_path: pathlib.Path) -> None:
    python = "{kind: python, factory: 'factories:%s'}"
    text = f"nprocs: 1\nbatch_size_per_device: 2\nmodel: {python % 'frozen'}\ndata: {python % 'data'}\n"
    with Service(tmp_path, text) as service, accelmgr.attach(service.socket, timeout=60) as manager:
        optimizer = torch.optim.AdamW(manager.parameters())
        with pytest.raises(accelmgr.UsageError, match="parameter 'offset', in group 0, was frozen when"):
            manager.step(optimizer=optimizer)


def trained(service: Service, steps: int) -> list[torch.Tensor]:
    """Parameters and state after so many steps. Only the first host makes a state."""
    with accelmgr.attach(service.socket, timeout=60) as manager:
        optimizer = torch.optim.AdamW(manager.parameters(), lr=0.01)
        for result in manager.steps(steps - manager.statistics().steps, optimizer=optimizer, clip_grad_norm=0.05):
            assert result.samples == 8
        return copies(manager) + states(optimizer)


DIES_WHILE_IT_LOADS = """
    import os, signal, sys, torch, accelmgr
    from accelmgr._host import session_updates

    with accelmgr.attach(sys.argv[1], timeout=60) as manager:
        optimizer = torch.optim.AdamW(manager.parameters())
        for parameter in manager.parameters():
            state = {name: torch.ones_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
            optimizer.state[parameter] = state | {"step": torch.tensor(7.0)}
        written = session_updates.write
        places = []

        def write(place, value):
            places.append(place)
            if len(places) == 4:
                os.kill(os.getpid(), signal.SIGKILL)
            written(place, value)

        session_updates.write = write
        manager.step(optimizer=optimizer)
"""


def test_a_state_that_a_host_has_half_written_is_nobody_s(service: Service) -> None:
    trained(service, 2)
    program = [sys.executable, "-c", textwrap.dedent(DIES_WHILE_IT_LOADS), os.fspath(service.socket)]
    assert subprocess.run(program, timeout=60).returncode == -signal.SIGKILL
    with accelmgr.attach(service.socket, timeout=60):
        pass  # Waits until the service has seen that the host is dead.
    assert "no host has made an inner step" in accelmgr_step(service, "--update")
    with accelmgr.attach(service.socket, timeout=60) as manager:
        optimizer = torch.optim.AdamW(manager.parameters())
        manager.step(optimizer=optimizer).raise_for_status()
        assert float(optimizer.state[manager.parameters()[0]]["step"]) == 1


def test_a_state_that_is_older_than_the_last_step_is_not_taken(service: Service) -> None:
    with accelmgr.attach(service.socket) as manager:
        optimizer = torch.optim.AdamW(manager.parameters())
        manager.step(optimizer=optimizer).raise_for_status()
        manager.step().raise_for_status()
        optimizer.step()
    with accelmgr.attach(service.socket, timeout=60) as manager:
        optimizer = torch.optim.AdamW(manager.parameters())
        manager.step(optimizer=optimizer).raise_for_status()
        assert float(optimizer.state[manager.parameters()[0]]["step"]) == 1


def accelmgr_says(service: Service, command: str, *options: str) -> str:
    words = [os.fspath(PROGRAM), command, "--socket", os.fspath(service.socket), *options]
    said = subprocess.run(words, capture_output=True, text=True, timeout=60)
    return said.stdout + said.stderr


def accelmgr_step(service: Service, *options: str) -> str:
    return accelmgr_says(service, "step", *options)


def test_the_service_goes_on_without_a_host_and_the_next_one_after_it(
    service: Service, tmp_path_factory: pytest.TempPathFactory
) -> None:
    assert "no host has made an inner step" in accelmgr_step(service, "--update")
    trained(service, 2)
    assert accelmgr_step(service, "--update", "--count", "3").count("loss") == 3
    with Service(tmp_path_factory.mktemp("other")) as other:
        assert all(map(torch.equal, trained(service, 6), trained(other, 6)))
