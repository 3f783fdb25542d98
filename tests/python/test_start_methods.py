"""How manager processes come to be: the same for all who use them."""

from __future__ import annotations

import logging
import os
import pathlib
import re
import select
import signal
from collections.abc import Iterator

import pytest
import torch
from conftest import descendants
from gate import Count, Told
from torch import nn

import accelmgr
from accelmgr import _native
from accelmgr._payload import Payload, Received, pickled
from accelmgr.manager import START_METHODS

METHODS = pytest.mark.parametrize("method", START_METHODS)


@pytest.fixture(autouse=True, scope="module")
def forkserver() -> Iterator[None]:
    """It serves all managers of a process and ends with it; here it is of a module's tests."""
    accelmgr.Manager(Told(pathlib.Path()), Count(), nprocs=1, start_method="forkserver").stop()
    yield
    _native.end_forkserver()


def kill(pid: int) -> None:
    """Returns when it has ended."""
    fd = os.pidfd_open(pid)
    try:
        os.kill(pid, signal.SIGKILL)
        select.select([fd], [], [])
    finally:
        os.close(fd)


def server() -> int:
    (pid,) = [pid for pid, name in descendants().items() if name == "accelmgr:server"]
    return pid


def lines() -> Iterator[torch.Tensor]:
    """What no pickle takes."""
    yield from Count()


@METHODS
def test_a_manager_trains_and_is_replaced(tmp_path, method):
    model = Told(tmp_path)
    with accelmgr.Manager(model, lines(), nprocs=2, start_method=method, runners__restart_backoff=0.01) as manager:
        assert manager.step(accumulate=False).ok
        model.tell("die")
        assert manager.step(accumulate=False).tries == 2
        pid = manager.statistics().manager_pid
        kill(pid)
        with pytest.raises(accelmgr.ManagerLost, match=r"killed by signal 9 \(KILL\)"):
            manager.step(accumulate=False).raise_for_status()
        manager.recover()
        assert manager.statistics().manager_pid != pid
        assert manager.step(accumulate=False).ok
        assert (4 * model.weight.grad[0]).round() == 4 + 5, "elements 4 and 5, exactly once"


class Once:
    """Can be had back from a pickle, or called, in one process; in the next it raises."""

    def __init__(self, folder: pathlib.Path) -> None:
        self._file = folder / "once"

    def __call__(self, elements: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(elements)

    def __setstate__(self, state: dict[str, pathlib.Path]) -> None:
        self.__dict__.update(state)
        if self._file.exists():
            raise LookupError("a second time")
        self._file.touch()


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_the_model_is_as_it_was_when_a_runner_did_not_start(tmp_path, method):
    """By then its parameters are the session's."""
    model = nn.Sequential(Told(tmp_path), nn.BatchNorm1d(2))
    gradient = torch.tensor([7.0, 8.0])
    model[0].weight.grad = gradient
    with pytest.raises(accelmgr.RunnerError, match="LookupError: a second time"):
        accelmgr.Manager(
            model, Count(), collate_fn=Once(tmp_path), nprocs=1, start_method=method, runners__on_loss="fail"
        )
    assert "memfd:accelmgr" not in pathlib.Path("/proc/self/maps").read_text()
    assert model[0].weight.tolist() == [1, 2] and model[0].weight.grad is gradient
    assert model[1].running_var.tolist() == [1, 1] and model[1].weight.grad is None


@METHODS
def test_a_model_exists_once_when_it_has_started(method):
    """Not in the session and, beside it, in what it was taken from: in no process of the manager."""
    model = nn.Linear(2048, 2048, bias=False)
    with accelmgr.Manager(model, [torch.zeros(2048)], nprocs=1, start_method=method):
        for pid in (os.getpid(), *descendants()):
            taken = 0
            for mapping in pathlib.Path(f"/proc/{pid}/smaps").read_text().split("VmFlags")[:-1]:
                if "accelmgr-values" in mapping:
                    taken += int(mapping.partition("\nRss:")[2].split()[0])
            assert taken == 0, pid


class Shouting(Told):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        os.write(1, f"in {os.getcwd()}\n".encode())
        return super().forward(x)


def own_memory() -> int:
    """Bytes of this process that are no file's and shared with nobody."""
    status = pathlib.Path("/proc/self/status").read_text()
    return int(re.search(r"RssAnon:\s+(\d+) kB", status)[1]) << 10


def test_a_replica_has_no_memory_for_values_that_the_session_has():
    model = nn.Linear(4096, 4096)
    size = sum(parameter.nbytes for parameter in model.parameters())
    payload = Payload(model, None, pickled("dataset", None), None, {})
    payload.release_values()
    before = own_memory()
    replica = Received(payload.path).model()
    assert own_memory() - before < size / 8
    assert replica.weight.shape == model.weight.shape
    payload.close()


@METHODS
def test_runners_have_the_host_s_streams_and_folder(tmp_path, method, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with accelmgr.Manager(Shouting(tmp_path), Count(), nprocs=1, start_method=method) as manager:
        assert manager.step().ok
    assert f"in {tmp_path}\n" in capfd.readouterr().out


def test_a_fork_names_the_threads_that_it_leaves_behind(tmp_path, caplog):
    with accelmgr.Manager(Told(tmp_path), lines(), nprocs=1):  # A generator is read in a thread.
        with caplog.at_level(logging.WARNING, "accelmgr"):
            accelmgr.Manager(Told(tmp_path), Count(), nprocs=1, start_method="fork").stop()
    assert "threads (" in caplog.text and "'spawn' copies nothing" in caplog.text


def test_the_forkserver_is_started_once_and_replaced_when_it_has_died(tmp_path):  # The last test: it ends it.
    first = server()
    with accelmgr.Manager(Told(tmp_path), Count(), nprocs=1, start_method="forkserver") as manager:
        assert server() == first
        kill(first)
        assert manager.step().ok, "what it forked does not need it"
        other = Told(tmp_path)
        with accelmgr.Manager(other, Count(), nprocs=1, start_method="forkserver") as another:
            assert another.step().ok and server() != first
        kill(manager.statistics().manager_pid)
        result = manager.step()
        assert result.status == "manager_lost" and "how it ended is not known" in result.error, result.error
    _native.end_forkserver()
