"""Checks that managers behave the same with every start method."""

from __future__ import annotations

import logging
import os
import pathlib
import re
import threading
from collections.abc import Iterator

import numpy
import pytest
import torch
from conftest import descendants
from gate import Count, Told
from launching import kill
from programs import run
from torch import nn

import accelmgr
from accelmgr import _native
from accelmgr._host.model_sending import SentModel, pickled_dataset
from accelmgr._host.start_method import START_METHODS
from accelmgr._runner.received import Received

METHODS = pytest.mark.parametrize("method", START_METHODS)


def lines() -> Iterator[torch.Tensor]:
    """A generator: it cannot be pickled."""
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


class OpenForks(nn.Module):
    """Counts calls that os.register_at_fork makes before a fork, minus those after it."""

    count = 0

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    @classmethod
    def add(cls, number: int) -> None:
        cls.count += number

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.weight * x).mean(), "open": torch.tensor(float(self.count))}


def test_what_python_calls_at_a_fork_is_called_in_pairs():
    """Python 3.13 aborts a child in which it makes the calls after a fork without those before it."""
    os.register_at_fork(
        before=lambda: OpenForks.add(1),
        after_in_parent=lambda: OpenForks.add(-1),
        after_in_child=lambda: OpenForks.add(-1),
    )
    with accelmgr.Manager(OpenForks(), lines(), nprocs=2, start_method="fork") as manager:
        assert manager.step().scalars == {"open": 0.0}
    assert OpenForks.count == 0


class Once:
    """A collate_fn that the manager can unpickle. The next process that unpickles it, a runner, gets an error."""

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
    """When the runner fails, the model's parameters are already in the session; they must come back."""
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
    """No process keeps the memory of the initial values beside the session."""
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
    """Bytes of anonymous memory that this process has."""
    status = pathlib.Path("/proc/self/status").read_text()
    return int(re.search(r"RssAnon:\s+(\d+) kB", status)[1]) << 10


def test_a_replica_has_no_memory_for_values_that_the_session_has():
    model = nn.Linear(4096, 4096)
    size = sum(parameter.nbytes for parameter in model.parameters())
    payload = SentModel(model, None, pickled_dataset(None), None, {"constants": False, "grown": {}})
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


held = threading.Lock()


def test_a_fork_that_waits_for_a_lock_of_another_thread_is_replaced_and_the_thread_named(tmp_path, caplog):
    """A handler of os.register_at_fork takes the lock in the child, which has no thread that would release it."""
    os.register_at_fork(after_in_child=lambda: held.acquire() and held.release())
    taken, done = threading.Event(), threading.Event()

    def hold() -> None:
        pathlib.Path("/proc/thread-self/comm").write_text("holder")
        with held:
            taken.set()
            done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    taken.wait()
    try:
        with pytest.raises(accelmgr.SessionError, match="3 forks of this process did not begin: they wait for a lock"):
            accelmgr.Manager(Told(tmp_path), Count(), nprocs=1, start_method="fork")
        with caplog.at_level(logging.WARNING, "accelmgr"):
            with accelmgr.Manager(Told(tmp_path), Count(), nprocs=1) as manager:
                assert manager.step().ok
    finally:
        done.set()
        thread.join()
    assert "the start method is 'forkserver' instead" in caplog.text and "holder" in caplog.text


def busy() -> None:
    """What leaves threads behind that a fork does not have, and that the fork's libraries may wait for."""
    torch.set_num_threads(2)
    square = torch.randn(600, 600, requires_grad=True)
    (square @ square).tanh().sum().backward()  # OpenMP, and MKL or OpenBLAS
    numpy.random.rand(400, 400) @ numpy.random.rand(400, 400)  # Its own OpenBLAS
    torch.jit.wait(torch.jit.fork(torch.relu, square))  # torch's pool between operators
    quantized = torch.ao.nn.quantized.dynamic.Linear(64, 64)
    quantized(torch.randn(256, 64))


class Heavy(nn.Module):
    """Computes with all that busy() has used."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(600, 600)
        self.quantized = torch.ao.nn.quantized.dynamic.Linear(600, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        numpy.random.rand(400, 400) @ numpy.random.rand(400, 400)
        with torch.no_grad():
            beside = self.quantized(x).sum()
        return torch.tanh(self.layer(x)).square().mean() + 0 * beside


def test_a_fork_of_a_host_whose_libraries_have_threads_computes(tmp_path):
    """Also while other threads of the host allocate, log and compute."""
    busy()
    model = Heavy()
    rows = torch.randn(512, 600)
    expected = model(rows[:256]).item()
    ended = threading.Event()

    def work() -> None:
        while not ended.is_set():
            logging.getLogger("busy").info("%s", [torch.randn(50, 50) @ torch.randn(50, 50) for _ in range(4)])

    threads = [threading.Thread(target=work) for _ in range(10)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(3):
            with accelmgr.Manager(
                model, list(rows), nprocs=1, batch_size_per_device=256, start_method="fork", runners__threads=2
            ) as manager:
                assert manager.step(timeout=120).loss == pytest.approx(expected, rel=1e-4)
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def test_a_thread_that_is_not_the_first_one_may_start_a_manager(tmp_path):
    """In the fork the stack of that thread is free, and another thread takes it."""
    manager = accelmgr.Manager(Told(tmp_path), Count(), nprocs=2, start=False, start_method="fork")
    try:
        for call in (manager.start, manager.refresh):
            thread = threading.Thread(target=call)
            thread.start()
            thread.join()
            assert manager.step(accumulate=False).ok
    finally:
        manager.stop()


SITE = """
import threading
import numpy
numpy.ones((300, 300)) @ numpy.ones((300, 300))
threading.Thread(target=threading.Event().wait, daemon=True).start()
"""


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_interpreters_may_begin_with_other_threads(tmp_path, method, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text(SITE)
    path = os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{path}" if path else str(tmp_path))
    _native.end_forkserver()
    model = Told(tmp_path)
    with accelmgr.Manager(model, Count(), nprocs=2, start_method=method, runners__restart_backoff=0.01) as manager:
        assert manager.step(accumulate=False).ok
        model.tell("die")
        assert manager.step(accumulate=False).tries == 2
    _native.end_forkserver()


CHANGES_USER = """\
import os, pathlib, sys, accelmgr
from gate import Count, Told
os.setgid(65534)
os.setuid(65534)
try:
    accelmgr.Manager(Told(pathlib.Path(sys.argv[1])), Count(), nprocs=1, start_method=sys.argv[2])
except accelmgr.ModelError as error:
    print(error)
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_host_that_has_changed_its_user_is_told_why_no_process_can_be_executed(tmp_path, method):
    # Its interpreter and its packages may be for root alone: imports come before setuid(), and may fail after it.
    tmp_path.chmod(0o755)
    code, out, err = run("-c", CHANGES_USER, str(tmp_path), method, cwd=tmp_path)
    assert code == 0, err
    assert "changed its user or group" in out and "start_method='fork'" in out, out + err
