"""A host of Python attaches to a service, which `accelmgr serve` runs."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

import accelmgr
from accelmgr import _native

PROGRAM = pathlib.Path(_native.__file__).parents[2] / "tools" / "accelmgr"

CONFIGURATION = """\
nprocs: 2
batch_size_per_device: 4
runners: {threads: 1}
model: {kind: mlp, mlp: {input_size: 16, hidden_size: 32}}
"""


class Service:
    def __init__(self, folder: pathlib.Path) -> None:
        configuration = folder / "service.yaml"
        configuration.write_text(CONFIGURATION)
        self.socket = folder / "socket"
        command = [
            os.fspath(PROGRAM),
            "serve",
            "--config",
            os.fspath(configuration),
            "--socket",
            os.fspath(self.socket),
        ]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        assert self.process.stdout.readline().startswith("ready: model 'mlp', 2 runners")

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(30)


@pytest.fixture
def service(tmp_path: pathlib.Path) -> Iterator[Service]:
    service = Service(tmp_path)
    try:
        yield service
    finally:
        service.process.kill()
        service.process.wait()
        assert service.process.stdout is not None
        service.process.stdout.close()


def test_trains_the_model_of_a_service(service: Service) -> None:
    with accelmgr.attach(service.socket, name="trainer") as manager:
        optimizer = torch.optim.SGD(manager.parameters(), lr=0.1)
        before = [parameter.detach().clone() for parameter in manager.parameters()]
        for result in manager.steps(3):
            assert result.samples == 8
            with manager.writing():
                optimizer.step()
            manager.zero_grad()
        assert any(not torch.equal(a, b) for a, b in zip(before, manager.parameters(), strict=True))
        assert manager.statistics().steps == 3
        trained = manager.state_dict()
    assert manager.unfinished == ""
    with accelmgr.attach(service.socket) as manager:
        assert all(torch.equal(value, trained[name]) for name, value in manager.named_parameters())
    assert service.stop() == 0


def test_a_stopped_host_keeps_what_it_had(service: Service) -> None:
    first = accelmgr.attach(service.socket)
    first.step()
    first.stop()
    kept = first.named_gradients()[0][1].clone()
    with accelmgr.attach(service.socket) as second:
        second.step()
        assert not torch.equal(second.named_gradients()[0][1], kept)
    assert torch.equal(first.named_gradients()[0][1], kept)
    with pytest.raises(accelmgr.UsageError, match="after stop"):
        first.step()


def test_another_host_is_named(service: Service) -> None:
    with accelmgr.attach(service.socket, name="first"), pytest.raises(accelmgr.SessionError, match=r"first \(pid"):
        accelmgr.attach(service.socket)


def test_no_service_is_said(tmp_path: pathlib.Path) -> None:
    with pytest.raises(accelmgr.SessionError, match="no service can be reached at"):
        accelmgr.attach(tmp_path / "nothing")


def test_a_host_that_is_killed_while_it_writes_is_told_of(service: Service) -> None:
    program = (
        "import accelmgr, os, signal\n"
        f"manager = accelmgr.attach({os.fspath(service.socket)!r}, name='doomed')\n"
        "with manager.writing():\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -signal.SIGKILL
    with accelmgr.attach(service.socket) as manager:
        assert "(doomed) ended while it wrote parameters" in manager.unfinished
        manager.step()
