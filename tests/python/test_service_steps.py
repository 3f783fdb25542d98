"""Steps of begin_steps() that a service makes: they go on without their host, and the next one finds the results."""

from __future__ import annotations

import pathlib
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator

import pytest
import torch
from services import CONFIGURATION, Service
from test_session_updates import accelmgr_says, accelmgr_step, copies, states

import accelmgr

ENDLESS = 100_000


@pytest.fixture
def other(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Another one, from the same beginning."""
    with Service(tmp_path_factory.mktemp("other")) as service:
        yield service


def adamw(manager: accelmgr.Manager) -> torch.optim.Optimizer:
    return torch.optim.AdamW(manager.parameters(), lr=0.01)


def attach(service: Service, **options) -> accelmgr.Manager:
    return accelmgr.attach(service.socket, timeout=60, **options)


def undisturbed(service: Service, steps: int) -> tuple[list[float], list[torch.Tensor]]:
    with attach(service) as manager:
        optimizer = adamw(manager)
        losses = [result.loss for result in manager.steps(steps, optimizer=optimizer, clip_grad_norm=0.5)]
        return losses, copies(manager) + states(optimizer)


def assert_same_bits(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    assert len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


def test_the_bits_of_steps(service: Service, other: Service) -> None:
    losses, tensors = undisturbed(other, 9)
    with attach(service) as manager:
        optimizer = adamw(manager)
        pending = manager.begin_steps(5, optimizer=optimizer, clip_grad_norm=0.5)
        assert pending is manager.pending_steps
        made = pending.result(60)
        assert pending.done() and [result.step for result in made] == [1, 2, 3, 4, 5]
        made += manager.steps(2, optimizer=optimizer, clip_grad_norm=0.5)
        made += manager.begin_steps(2, optimizer=optimizer, clip_grad_norm=0.5).result(60)
        assert [result.loss for result in made] == losses
        assert all(result.grad_norm > 0 and result.samples == 8 for result in made)
        assert_same_bits(copies(manager) + states(optimizer), tensors)


def test_a_host_that_waits_changes_nothing(service: Service) -> None:
    with attach(service) as manager:
        optimizer = adamw(manager)
        pending = manager.begin_steps(ENDLESS, optimizer=optimizer)
        for call in (
            manager.step,
            manager.zero_grad,
            manager.writing,
            manager.state_dict,
            lambda: manager.update_model_parameters(copies(manager)),
            lambda: manager.begin_steps(1, optimizer=optimizer),
            lambda: manager.step(optimizer=optimizer),
        ):
            with pytest.raises(accelmgr.UsageError, match="under way"):
                call()
        pending.cancel()
        made = pending.result()
        assert 0 < len(made) < ENDLESS
        assert [result.step for result in made] == list(range(1, len(made) + 1))
        assert manager.step(optimizer=optimizer).step == len(made) + 1


BEGINS = """
    import os, sys, torch, accelmgr
    manager = accelmgr.attach(sys.argv[1], timeout=60)
    optimizer = torch.optim.AdamW(manager.parameters(), lr=0.01)
    manager.begin_steps(int(sys.argv[2]), optimizer=optimizer, clip_grad_norm=0.5)
    print("begun", flush=True)
    {end}
"""
ENDS = {
    "killed": "os.kill(os.getpid(), 9)",
    "exits": "",
    "stops": "manager.stop()",
    "waits_and_is_killed": "sys.stdin.read()",
}


def begin_and_end(service: Service, steps: int, end: str) -> subprocess.Popen[str]:
    program = [sys.executable, "-c", textwrap.dedent(BEGINS).format(end=ENDS[end]), service.socket, str(steps)]
    host = subprocess.Popen(program, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True)
    assert host.stdout is not None and host.stdout.readline() == "begun\n"
    return host


@pytest.mark.parametrize("end", ENDS)
def test_the_next_host_gets_all_results(service: Service, other: Service, end: str) -> None:
    losses, _ = undisturbed(other, 400)
    with begin_and_end(service, 400, end) as host:
        if end == "waits_and_is_killed":
            host.kill()
        host.communicate()
        assert host.returncode == (-signal.SIGKILL if "killed" in end else 0)
    with attach(service) as manager:
        pending = manager.pending_steps
        assert pending is not None
        assert [result.loss for result in pending.result(60)] == losses
        optimizer = adamw(manager)
        assert manager.step(optimizer=optimizer).step == 401  # It goes on with what the session has.
        assert float(optimizer.state[manager.parameters()[0]]["step"]) == 401
    with attach(service) as manager:
        assert manager.pending_steps is None  # There is a later step.


def test_the_end_of_the_data_ends_them(tmp_path: pathlib.Path) -> None:
    with Service(tmp_path, CONFIGURATION + "data: {epochs: 1, elements: 80}\n") as service:
        with attach(service) as manager:
            pending = manager.begin_steps(ENDLESS, optimizer=adamw(manager))
            assert len(pending.result(60)) == 10


def test_a_step_that_fails_ends_them(tmp_path: pathlib.Path) -> None:
    with Service(tmp_path) as service:
        with attach(service) as manager:
            optimizer = torch.optim.SGD(manager.parameters(), lr=1e30)
            pending = manager.begin_steps(ENDLESS, optimizer=optimizer)
            with pytest.raises(accelmgr.Error, match="not finite|nonfinite"):
                pending.result(60)
            assert len(pending.results()) == manager.statistics().steps < 10


def test_a_service_that_ends_or_is_killed(service: Service, other: Service) -> None:
    with attach(service) as manager:
        pending = manager.begin_steps(ENDLESS, optimizer=adamw(manager))
        service.process.send_signal(signal.SIGTERM)
        with pytest.raises(accelmgr.ManagerLost, match="is being stopped"):
            pending.result(60)
    assert service.process.wait(30) == 0
    with attach(other) as manager:
        pending = manager.begin_steps(ENDLESS, optimizer=adamw(manager))
        other.process.kill()
        with pytest.raises(accelmgr.ManagerLost):
            pending.result(60)


def test_without_any_host_and_the_next_one_ends_them(service: Service) -> None:
    with attach(service) as manager:
        manager.step(optimizer=adamw(manager)).raise_for_status()
    begin = ("--update", "--count", str(ENDLESS), "--no-wait")
    assert accelmgr_step(service, *begin) == f"{ENDLESS} steps have begun\n"
    assert "try again when they are over" in accelmgr_step(service)  # It is refused.
    assert f"of {ENDLESS} steps are made\n" in accelmgr_says(service, "cancel")
    lines = accelmgr_says(service, "pending").splitlines()
    with attach(service) as manager:
        assert len(lines) == manager.statistics().steps
        assert manager.pending_steps is not None
        assert len(manager.pending_steps.result(60)) == len(lines) - 1
    accelmgr_step(service, *begin)
    with attach(service) as manager:
        pending = manager.pending_steps
        assert pending is not None and not pending.done()
        with pytest.raises(accelmgr.UsageError, match="`pending_steps`"):
            manager.step()
        pending.cancel()
        assert len(lines) + len(pending.results()) == manager.statistics().steps
