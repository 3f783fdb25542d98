"""What forks of a script find changed around them: threads that are gone, variables, what forward() leaves behind."""

from __future__ import annotations

import collections
import concurrent.futures
import logging.handlers
import multiprocessing.pool
import os
import pathlib
import queue
import re
import resource
import threading
import types
from typing import Any

import pytest
import torch
from launching import kill
from programs import BOUND_S, started
from torch import nn

import accelmgr

ELEMENTS = [torch.full((3,), float(index)) for index in range(1, 20)]


class Scaled(nn.Module):
    """Its gradient is its input, times what `factor` returns."""

    def __init__(self, factor) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).sum() * self.factor()


def gradients(manager: accelmgr.Manager, steps: int) -> list[float]:
    found = []
    for _ in range(steps):
        manager.zero_grad()
        manager.step().raise_for_status()
        found.append(float(manager.named_gradients()[0][1][0]))
    return found


PRINTS = """
import logging, sys
import torch, accelmgr

handler = logging.StreamHandler(sys.stdout)
logging.getLogger().addHandler(handler)

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)

    def forward(self, x):
        print("batch", int(x[0, 0]), "-" * 300)
        logging.warning("logged %d", int(x[0, 0]))
        return self.layer(x).square().mean()

class Rows:
    def __len__(self):
        return 1000

    def __getitem__(self, index):
        print("read", index, flush=False)
        return torch.full((3,), float(index))

if __name__ == "__main__":
    print("first line of the script")
    with accelmgr.Manager(Net(), Rows(), nprocs=1, batch_size_per_device=1, start_method=sys.argv[1]) as manager:
        for _ in manager.steps(60):
            manager.zero_grad()
    print("last line of the script")
"""


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_what_model_and_dataset_print_comes_once_also_in_a_pipe(method: str, tmp_path: pathlib.Path) -> None:
    (tmp_path / "script.py").write_text(PRINTS)
    with started("script.py", method, cwd=tmp_path, PYTHONUNBUFFERED="") as process:
        out, err = process.communicate(timeout=BOUND_S)
    assert process.returncode == 0, err
    lines = collections.Counter(line.rstrip(" -") for line in out.splitlines())
    script = ["first line of the script", "last line of the script"]
    # Another interpreter does not have what the script has done to `logging`.
    kinds = ("batch", "read", "logged") if method == "fork" else ("batch", "read")
    steps = [f"{what} {index}" for what in kinds for index in range(60)]
    assert {line: lines[line] for line in (*script, *steps)} == dict.fromkeys((*script, *steps), 1)


class Read:
    """A dataset that reads in threads or processes."""

    def __init__(self, pool: concurrent.futures.Executor | multiprocessing.pool.Pool) -> None:
        self.pool = pool

    def __len__(self) -> int:
        return len(ELEMENTS)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((3,), next(iter(self.pool.map(float, [index + 1]))))


@pytest.mark.parametrize(
    "kind",
    [
        concurrent.futures.ThreadPoolExecutor,
        concurrent.futures.ProcessPoolExecutor,
        multiprocessing.pool.ThreadPool,
        multiprocessing.pool.Pool,
    ],
)
def test_pools_work_in_model_and_dataset(kind):
    with kind(2) as pool:
        assert list(pool.map(abs, [-1, -2, -3])) == [1, 2, 3]  # It has begun.
        model = Scaled(lambda: sum(pool.map(abs, [-1, -1])))
        with accelmgr.Manager(model, Read(pool), nprocs=2, batch_size_per_device=1) as manager:
            assert gradients(manager, 2) == [3.0, 7.0]
            submit = pool.submit(abs, -5).result if hasattr(pool, "submit") else pool.apply_async(abs, (-5,)).get
            assert submit(60) == 5
            manager.refresh()
            assert gradients(manager, 1) == [11.0]


def test_a_writer_of_tensorboard_writes_what_forward_gives_it(tmp_path):
    writers = pytest.importorskip("torch.utils.tensorboard")
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    steps = 30  # More than wait in the writer's queue.
    with writers.SummaryWriter(tmp_path) as writer:
        writer.add_scalar("of the host", 0.0)
        model = Scaled(lambda: writer.add_scalar("of a runner", 0.0) or 1.0)
        model.writer = writer
        with accelmgr.Manager(model, ELEMENTS, nprocs=1, batch_size_per_device=1, data__epochs=2) as manager:
            for count in (steps, 1):
                gradients(manager, count)
                manager.call(lambda model: model.writer.flush())
                manager.refresh()
        writer.add_scalar("of the host", 0.0)
    found = events.EventAccumulator(str(tmp_path)).Reload()
    assert {name: len(found.Scalars(name)) for name in found.Tags()["scalars"]} == {
        "of the host": 2,
        "of a runner": steps + 1,
    }


def test_what_forward_logs_through_a_listener_s_queue_is_handled(tmp_path):
    messages: queue.SimpleQueue[logging.LogRecord] = queue.SimpleQueue()
    listener = logging.handlers.QueueListener(messages, logging.FileHandler(tmp_path / "log"))
    log = logging.getLogger("test_forked_surroundings")
    handler = logging.handlers.QueueHandler(messages)
    log.addHandler(handler)
    listener.start()
    try:
        model = Scaled(lambda: log.warning("in forward") or 1.0)
        with accelmgr.Manager(model, ELEMENTS, nprocs=1, batch_size_per_device=1) as manager:
            gradients(manager, 3)
        log.warning("in the host")
    finally:
        listener.stop()
        log.removeHandler(handler)
    assert (tmp_path / "log").read_text().splitlines() == ["in forward"] * 3 + ["in the host"]


def test_a_step_that_waits_for_a_thread_of_the_script_names_it(caplog):
    asked: queue.Queue[int] = queue.Queue()
    answers: queue.Queue[float] = queue.Queue()

    def answer() -> None:
        while asked.get():
            answers.put(1.0)

    def ask() -> float:
        asked.put(1)
        return answers.get()

    thread = threading.Thread(target=answer, name="answers-of-the-script")
    thread.start()
    with accelmgr.Manager(Scaled(ask), ELEMENTS, nprocs=1, batch_size_per_device=1) as manager:
        with caplog.at_level(logging.WARNING):
            assert manager.step(timeout=0.5).status == "timeout"
        assert re.search(r"none of its other threads \(.*answers-of-the-script\)", caplog.text)
    asked.put(0)
    thread.join()


def test_runners_have_what_the_script_s_thread_keeps_for_itself():
    kept, begun = threading.local(), threading.local()
    kept.factor = 2.0

    def factor():
        begun.by_runner = True
        return kept.factor

    model = Scaled(factor)
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    with accelmgr.Manager(model, ELEMENTS, nprocs=1, batch_size_per_device=1) as manager:
        assert gradients(manager, 1) == [2 * 1]
        kept.factor = 3.0
        assert gradients(manager, 2) == [3 * 2, 3 * 3]
        kill(manager.statistics().runners[0].pid)
        assert gradients(manager, 1) == [3 * 4]
        kept.factor = 4.0
        manager.begin_steps(1, optimizer=sgd).result()  # Another thread makes them.
        assert model.weight[0] == -4 * 5
    assert not hasattr(begun, "by_runner")


def test_runners_go_to_the_folder_to_which_the_script_goes(tmp_path, monkeypatch):
    for name, factor in (("one", 1.0), ("two", 2.0)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "factor").write_text(str(factor))
    monkeypatch.chdir(tmp_path / "one")
    model = Scaled(lambda: float(pathlib.Path("factor").read_text()))
    with accelmgr.Manager(model, ELEMENTS, nprocs=1, batch_size_per_device=1) as manager:
        assert gradients(manager, 2) == [1.0, 2.0]
        monkeypatch.chdir(tmp_path / "two")
        assert gradients(manager, 2) == [6.0, 8.0]


def test_runners_and_the_reading_process_have_the_environment(monkeypatch):
    monkeypatch.setenv("FACTOR", "1")

    class Dataset:
        def __len__(self) -> int:
            return len(ELEMENTS)

        def __getitem__(self, index: int) -> torch.Tensor:
            return ELEMENTS[index] * float(os.environ["FACTOR"])

    model = Scaled(lambda: float(os.environ["FACTOR"]))
    with accelmgr.Manager(model, Dataset(), nprocs=1, batch_size_per_device=1, prefetch=0) as manager:
        assert gradients(manager, 2) == [1.0, 2.0]
        before = manager.statistics().manager_pid
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/tmp/of-torch")  # torch 2.15 sets it with the first optimizer.
        assert gradients(manager, 1) == [3.0]
        assert manager.statistics().manager_pid == before
        monkeypatch.setenv("FACTOR", "3")
        assert gradients(manager, 1) == [36.0]
        monkeypatch.delenv("FACTOR")
        with pytest.raises(accelmgr.Error, match="FACTOR"):
            gradients(manager, 1)


class Counts(Scaled):
    def __init__(self, state: Any) -> None:
        super().__init__(lambda: 1.0)
        self.calls, self.seen, self.state = 0, [], state
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen.append(float(x[0, 0]))
        if isinstance(self.state, dict):
            self.state["calls"] += 1
        elif self.state is not None:
            self.state.calls += 1
        self.total += 1
        return super().forward(x)


@pytest.mark.parametrize("threads", [1, 12])
@pytest.mark.parametrize("nprocs", [1, 2])
def test_a_step_reuses_the_pages_of_the_step_before(nprocs, threads):
    """Also where the thread that forked has one of malloc's further heaps, which give large blocks back at once."""
    model = nn.Sequential(nn.Linear(5000, 4000), nn.Linear(4000, 1))  # A gradient of 76 MiB.
    elements = torch.rand(30, 5000).unbind()
    met = threading.Barrier(threads)
    others = [threading.Thread(target=met.wait) for _ in range(threads)]  # Each has a heap.
    for thread in others:
        thread.start()
    for thread in others:
        thread.join()
    settings = {"nprocs": nprocs, "batch_size_per_device": 1, "loss": lambda outputs, batch: outputs.square().mean()}
    with accelmgr.Manager(model, elements, **settings) as manager:

        def faults() -> int:
            return max(
                manager.call(lambda _: resource.getrusage(resource.RUSAGE_SELF).ru_minflt, rank)
                for rank in range(nprocs)
            )

        for _ in range(3):
            manager.step().raise_for_status()
        before = faults()
        for _ in range(8):
            manager.step().raise_for_status()
        assert faults() - before < 2 * 19_532  # Of a gradient. The heap may still grow once.


@pytest.mark.parametrize(
    ("state", "calls", "told"),
    [
        (None, 3, "'seen' of the model"),
        ({"calls": 0}, 0, "'calls' and 2 more of the model"),
        (types.SimpleNamespace(calls=0), 0, "'calls' and 2 more of the model"),
    ],
)
def test_what_stays_in_a_runner_is_told_once(capfd, state, calls, told):
    model = Counts(state)
    with accelmgr.Manager(model, ELEMENTS, nprocs=1, batch_size_per_device=1) as manager:
        gradients(manager, 3)
        assert manager.call(lambda model: (model.calls, model.seen)) == (3, [1.0, 2.0, 3.0])
        assert (model.calls, model.seen, float(model.total)) == (calls, [], 3.0)
    assert capfd.readouterr().err.count(f"forward() has changed {told}, which stays in the runner") == 1
