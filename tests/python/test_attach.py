"""A host of Python attaches to a service, which `accelmgr serve` runs."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import subprocess
import sys

import pytest
import torch
from saving import save
from services import CONFIGURATION, Service

import accelmgr


def trained(service: Service, steps: list[int]) -> dict[str, torch.Tensor]:
    """The parameters after hosts have made so many steps each, with one optimizer that they hand on."""
    for count in steps:
        with accelmgr.attach(service.socket, name="trainer") as manager:
            optimizer = torch.optim.AdamW(manager.parameters(), lr=0.1)
            extra = manager.restore(optimizer)
            assert extra == (None if manager.statistics().steps == 0 else {"host": "before"})
            for _ in manager.steps(count):
                optimizer.step()
                optimizer.zero_grad()
            save(manager, optimizer=optimizer, extra={"host": "before"})
            parameters = {name: value.detach().clone() for name, value in manager.named_parameters()}
    return parameters


def test_a_host_goes_on_with_the_optimizer_of_the_one_before(tmp_path: pathlib.Path) -> None:
    found = []
    for steps in ([4], [2, 2]):
        folder = tmp_path / str(len(steps))
        folder.mkdir()
        with Service(folder, CONFIGURATION, f"checkpoint.directory={folder / 'checkpoints'}") as service:
            found.append(trained(service, steps))
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


def test_no_service_is_said(tmp_path: pathlib.Path) -> None:
    with pytest.raises(accelmgr.SessionError, match="no service can be reached at"):
        accelmgr.attach(tmp_path / "nothing")


LOOP = """
import accelmgr, os, signal, sys, torch

class Dies(torch.optim.SGD):
    def step(self, closure=None):
        with torch.no_grad():
            self.param_groups[0]["params"][0].add_(1)
        os.kill(os.getpid(), signal.SIGKILL)

where, socket = sys.argv[1:]
manager = accelmgr.attach(socket, name="doomed")
optimizer = (Dies if where == "in the update" else torch.optim.SGD)(manager.parameters(), lr=0.1)
for step in range(3):
    manager.step().raise_for_status()
    if step == 2 and where == "before the update":
        break
    if step < 2 and where == "in the update":
        continue
    optimizer.step()
    if step == 2:
        break
    optimizer.zero_grad()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(
    ("where", "left"),
    [("before the update", "unapplied"), ("in the update", "applied"), ("after the update", "applied")],
)
def test_the_next_host_knows_how_far_a_plain_loop_has_come(service: Service, where: str, left: str) -> None:
    """Without writing(): an optimizer of torch marks its updates by itself."""
    command = [sys.executable, "-c", LOOP, where, os.fspath(service.socket)]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    with accelmgr.attach(service.socket) as manager:
        assert manager.left_gradients == left
        assert ("(doomed) ended while it wrote parameters" in manager.unfinished) == (where == "in the update")
        assert bool(manager.unfinished) == (where == "in the update")
        assert manager.statistics().steps == 3
        found = [gradient.clone() for _, gradient in manager.named_gradients()]
        assert any(gradient.any() for gradient in found)
        manager.step().raise_for_status()
        alone = [gradient.clone() for _, gradient in manager.named_gradients()]
        manager.step().raise_for_status()
        both = [gradient for _, gradient in manager.named_gradients()]
        assert not any(torch.equal(one, two) for one, two in zip(alone, both, strict=True))
    with accelmgr.attach(service.socket, keep_gradients=True) as manager:
        assert bool(manager.unfinished) == (where == "in the update"), "two steps have written nothing"
        with contextlib.suppress(ArithmeticError), manager.writing():
            raise ArithmeticError
    with accelmgr.attach(service.socket) as manager:
        assert bool(manager.unfinished) == (where == "in the update"), "the write was interrupted"
        with manager.writing():
            pass
    with accelmgr.attach(service.socket) as manager:
        assert manager.unfinished == ""


def test_the_next_host_goes_back_to_the_last_whole_parameters(tmp_path: pathlib.Path) -> None:
    with Service(tmp_path, CONFIGURATION, "parameters.snapshot=true") as service:
        with accelmgr.attach(service.socket) as manager:
            whole = [value.detach().clone() for value in manager.parameters()]
            with pytest.raises(accelmgr.UsageError, match="no earlier host"):
                manager.revert_parameters()
        command = [sys.executable, "-c", LOOP, "in the update", os.fspath(service.socket)]
        assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
        with accelmgr.attach(service.socket) as manager:
            assert manager.unfinished and manager.left_gradients == "applied"
            assert not all(map(torch.equal, manager.parameters(), whole))
            manager.revert_parameters()
            assert all(map(torch.equal, manager.parameters(), whole))
            assert manager.left_gradients == "unapplied"
            torch.optim.SGD(manager.parameters(), lr=0.1).step()
            assert not all(map(torch.equal, manager.parameters(), whole))
        with accelmgr.attach(service.socket) as manager:
            assert manager.unfinished == ""


def test_an_optimizer_that_evaluates_or_raises_leaves_no_mark(service: Service) -> None:
    class Raises(torch.optim.SGD):
        def step(self, closure=None):
            raise ArithmeticError

    with accelmgr.attach(service.socket) as manager:
        optimizer = torch.optim.SGD(manager.parameters(), lr=0.1)
        optimizer.step(lambda: manager.step().loss)
        with pytest.raises(ArithmeticError):
            Raises(manager.parameters(), lr=0.1).step()
        assert manager.step().ok
        with manager.writing():
            optimizer.step()
        assert manager.step().ok
    with accelmgr.attach(service.socket) as manager:
        assert manager.unfinished == ""


def test_a_service_has_a_name_or_a_path(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", os.fspath(tmp_path))
    monkeypatch.chdir(tmp_path)
    with Service(tmp_path, CONFIGURATION, socket="gpt") as service:
        with accelmgr.attach("gpt") as manager:
            manager.step()
        with accelmgr.attach(pathlib.Path("accelmgr-gpt.sock")), accelmgr.observe("gpt") as observer:
            assert observer.statistics().steps == 1
        with pytest.raises(accelmgr.SessionError, match=r"accelmgr\.sock"):
            accelmgr.attach(timeout=0)
        assert service.stop() == 0


PYTHON = """\
nprocs: 2
batch_size_per_device: 1
runners: {threads: 1}
model: {kind: python, factory: 'factories:model', options: {count: 5}}
data: {kind: python, factory: 'factories:data'}
"""


def test_a_service_of_python_reads_its_configuration_again(tmp_path: pathlib.Path) -> None:
    with Service(tmp_path, PYTHON, "runners.max_runners=3", "start_timeout=77") as service:
        service.configuration.write_text(PYTHON + "step_timeout: 7\nstart_timeout: 8\n")
        service.process.send_signal(signal.SIGHUP)
        service.wait_until_it_says("SIGHUP: step_timeout 300 -> 7\n")
        service.configuration.write_text(PYTHON.replace("count: 5", "count: 6"))
        service.process.send_signal(signal.SIGHUP)
        service.wait_until_it_says('SIGHUP: model.options "5" -> "6" needs another start of the service\n')
        service.configuration.write_text(PYTHON.replace("nprocs: 2", "nprocs: 3"))
        service.process.send_signal(signal.SIGHUP)
        service.wait_until_it_says("SIGHUP: nprocs 2 -> 3\n")
        assert "start_timeout" not in service.errors.read_text()  # What --set states is stronger than the file.
        with accelmgr.attach(service.socket) as manager:
            assert manager.named_parameters()[0][1].shape == (5,)
            assert manager.step().participants == 3
        assert service.stop() == 0
