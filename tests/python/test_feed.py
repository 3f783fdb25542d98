"""Tests of the feed: the host reads a dataset that cannot be pickled, and serves it to the manager process."""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import logging
import os
import pathlib
import queue
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch

import accelmgr
from accelmgr._data import feed as _feed
from accelmgr._data.elements import Elements
from accelmgr._data.feed import Client, Feed

NPROCS = 2
BATCH = 2
PREFETCH = 4
STEP = NPROCS * BATCH
HELD = STEP * (1 + PREFETCH // BATCH)  # Elements in the queues: those of the current step, and the prefetched ones.
PATIENCE_S = 60.0
OPTIONS = {"as_bytes": False, "max_element_bytes": 0}


class Line(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(3))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (x @ self.weight).mean(), "first": x[0, 0]}


def element(number: int) -> dict[str, torch.Tensor]:
    return {"x": torch.tensor([float(number), 1.0, float(number) ** 2])}


def numbers(count: int | None = None, given: list[int] | None = None) -> Iterator[dict[str, torch.Tensor]]:
    number = 0
    while count is None or number < count:
        if given is not None:
            given.append(number)
        yield element(number)
        number += 1


def expected_gradient(step: int) -> torch.Tensor:
    """The gradient of a step that does not accumulate: the mean of its elements."""
    return torch.stack([element(number)["x"] for number in range(step * STEP, (step + 1) * STEP)]).mean(0)


def make(dataset: Any, **options: Any) -> accelmgr.Manager:
    """With a start method that does not copy the host, whose datasets are then read there."""
    options = {"start_method": "forkserver"} | options
    options = {"nprocs": NPROCS, "batch_size_per_device": BATCH, "prefetch": PREFETCH, "step_timeout": 120} | options
    return accelmgr.Manager(Line(), dataset, **options)


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Polls: another process or thread changes the condition, and cannot notify this one."""
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, f"not within {PATIENCE_S} s: {what}"
        time.sleep(0.002)


def feed_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "accelmgr-feed"]


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    wait_until(lambda: not feed_threads(), "the threads of feeds end")


def drawn(seed: int, draws_between: int) -> tuple[list[float], list[float]]:
    """What a generator draws, and the host beside it: everything that it evaluates between steps."""
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)

    def drawing() -> Iterator[dict[str, torch.Tensor]]:
        while True:
            yield {"x": torch.tensor([random.random(), float(numpy.random.rand()), 0.0]) + torch.rand(3)}

    first, own = [], []
    with make(drawing()) as manager:
        for _ in range(6):
            first.append(manager.step().scalars["first"])
            for _ in range(draws_between):
                own += [torch.rand(()).item(), random.random(), float(numpy.random.rand())]
                os.sched_yield()  # Another thread that draws would draw here.
    return first, own


def test_a_generator_draws_the_same_whatever_the_host_draws_and_so_does_the_host() -> None:
    runs = [drawn(1, 300) for _ in range(4)]
    assert all(run == runs[0] for run in runs)
    assert drawn(1, 0)[0] == runs[0][0]
    torch.manual_seed(1)
    assert runs[0][1][::3] == [torch.rand(()).item() for _ in range(1800)]
    other, _ = drawn(2, 0)
    assert other != runs[0][0]
    assert not {round(value, 6) for value in other} & {round(value, 6) for value in runs[0][1]}


def test_a_generator_that_waits_for_the_host_is_read_beside_it(caplog: pytest.LogCaptureFixture) -> None:
    coming: queue.Queue[dict[str, torch.Tensor] | None] = queue.Queue()
    for number in range(STEP + 1):
        coming.put(element(number))
    with caplog.at_level(logging.WARNING, "accelmgr"), make(iter(coming.get, None), prefetch=2) as manager:
        for step in range(4):
            manager.step(accumulate=False).raise_for_status()
            torch.testing.assert_close(manager.get_aggregated_gradients()[0], expected_gradient(step))
            for number in range(STEP):
                coming.put(element(STEP + 1 + step * STEP + number))
        coming.put(None)  # However far the session has read: no thread waits for another element.
    assert caplog.text.count("reading an element takes more than 1 s") <= 1


def test_an_indexed_dataset_that_cannot_be_pickled_is_served_with_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    class Locked(torch.utils.data.Dataset[Any]):
        def __init__(self) -> None:
            self.lock = threading.Lock()

        def __len__(self) -> int:
            return 2 * STEP

        def __getitem__(self, index: int) -> Any:
            return element(index)

    with caplog.at_level(logging.INFO, "accelmgr"), make(Locked()) as manager:
        steps = [manager.get_aggregated_gradients()[0].clone() for _ in manager.steps(accumulate=False)]
    assert len(steps) == 2
    torch.testing.assert_close(steps[1], expected_gradient(1))
    assert "dataset.lock (_thread.lock) cannot be pickled" in caplog.text


def test_an_exception_before_the_first_element_ends_the_start() -> None:
    def failing() -> Iterator[Any]:
        raise RuntimeError("no such table")
        yield

    with pytest.raises(accelmgr.DataError, match="no such table"):
        make(failing())


def test_a_generator_that_is_stuck_does_not_hold_up_stop() -> None:
    go_on = threading.Event()

    def stuck() -> Iterator[Any]:
        yield from numbers(STEP)
        assert go_on.wait(240)

    manager = make(stuck())
    manager.step().raise_for_status()
    wait_until(lambda: manager._delivery.feed is not None and manager._delivery.feed._reader != 0, "it is stuck")
    begin = time.monotonic()
    manager.stop()
    assert time.monotonic() - begin < 120
    wait_until(lambda: len(feed_threads()) <= 1, "only the stuck thread is left, if it has begun to read")
    go_on.set()


def test_a_generator_is_read_no_further_than_the_session_holds() -> None:
    given: list[int] = []
    with make(numbers(given=given)) as manager:
        for step in range(30):
            manager.step().raise_for_status()
            assert len(given) <= HELD + (step + 1) * STEP
        assert manager._delivery.feed is not None
        assert len(manager._delivery.feed._kept) <= HELD + 32
    assert len(given) <= HELD + 30 * STEP


@pytest.mark.parametrize(("steps_before", "stuck"), [(0, False), (4, False), (4, True)])
def test_a_manager_that_takes_over_gets_the_same_elements(steps_before: int, stuck: bool) -> None:
    go_on = threading.Event()

    def elements() -> Iterator[Any]:
        for number, each in enumerate(numbers()):
            if stuck and number == 5 * STEP + 1:  # The killed manager asks for it, and its successor again.
                assert go_on.wait(PATIENCE_S)
            yield each

    def is_stuck() -> bool:
        return manager._delivery.feed is not None and manager._delivery.feed._reader != 0

    with make(elements()) as manager:
        step = 0

        def check() -> int:
            torch.testing.assert_close(manager.get_aggregated_gradients()[0], expected_gradient(step))
            return step + 1

        while step < steps_before:
            manager.step(accumulate=False).raise_for_status()
            step = check()
        if stuck:
            wait_until(is_stuck, "the generator is stuck")
        os.kill(manager.statistics().manager_pid, signal.SIGKILL)
        while result := manager.step(accumulate=False):  # Runners go on with the batches in their queues for a moment.
            step = check()
        assert result.status == "manager_lost"
        step += result.counted  # Runners may have made the step although the manager had ended.
        manager.recover()
        go_on.set()
        for _ in range(8):
            manager.step(accumulate=False).raise_for_status()
            step = check()


class Late:
    """A collate_fn that one process can unpickle. Further processes, the runners, can only if file `ready` exists."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.ready, self.taken = folder / "ready", folder / "taken"

    def __call__(self, elements: list[Any]) -> Any:
        return torch.utils.data.default_collate(elements)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self.taken.exists() and not self.ready.exists():
            raise LookupError("not ready")
        self.taken.touch()


def make_and_fail_to_start(collate: Late) -> accelmgr.Manager:
    manager = make(numbers(), collate_fn=collate, start=False, runners__on_loss="fail")
    with pytest.raises(accelmgr.RunnerError, match="LookupError: not ready"):
        manager.start()
    return manager


def test_a_start_after_one_that_failed_trains_on_the_same_elements(tmp_path: pathlib.Path) -> None:
    collate = Late(tmp_path)
    manager = make_and_fail_to_start(collate)
    collate.ready.touch()
    with manager:
        manager.step(accumulate=False).raise_for_status()
        torch.testing.assert_close(manager.get_aggregated_gradients()[0], expected_gradient(0))


def test_a_manager_that_did_not_start_takes_its_feed_along(tmp_path: pathlib.Path) -> None:
    manager = make_and_fail_to_start(Late(tmp_path))
    manager.stop()
    wait_until(lambda: not feed_threads(), "the threads end")


def test_a_forked_child_serves_nothing_and_keeps_nothing_open() -> None:
    with make(numbers()) as manager:
        manager.step().raise_for_status()
        feed = manager._delivery.feed
        assert feed is not None
        ready, release = os.pipe(), os.pipe()
        child = os.fork()
        if child == 0:
            closed = feed._listener.fileno() == -1 and all(each.fileno() == -1 for each in feed._connections)
            feed.close()
            os.write(ready[1], b"y" if closed and feed._connections else b"n")
            os.read(release[0], 1)
            os._exit(0)
        try:
            assert os.read(ready[0], 1) == b"y"
            manager.step().raise_for_status()
        finally:
            os.write(release[1], b".")
            os.waitpid(child, 0)
            for fd in (*ready, *release):
                os.close(fd)


def test_a_manager_that_is_dropped_takes_its_feed_along_and_does_not_wait_for_it(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_feed, "JOIN_S", 240.0)
    manager = make(numbers())
    manager.step().raise_for_status()
    assert feed_threads()
    begin = time.monotonic()
    del manager
    gc.collect()
    assert time.monotonic() - begin < 120
    assert "error" not in capfd.readouterr().err
    wait_until(lambda: not feed_threads(), "the threads end")


# The feed alone


@contextlib.contextmanager
def feeding(source: Any) -> Iterator[Feed]:
    feed = Feed(source)
    try:
        yield feed
    finally:
        gc.collect()  # Closes connections that a failed constructor or a cycle holds.
        feed.close()


@contextlib.contextmanager
def client_of(feed: Feed) -> Iterator[Client]:
    client = Client(feed.address)
    client._connection.settimeout(PATIENCE_S)
    try:
        yield client
    finally:
        client._connection.close()


def test_a_stranger_without_the_token_gets_nothing() -> None:
    given: list[int] = []
    with feeding(numbers(given=given)) as feed, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
        stranger.settimeout(PATIENCE_S)
        stranger.connect(feed.address.name)
        stranger.sendall(bytes(_feed.TOKEN_BYTES) + _feed.REQUEST.pack(0))
        with contextlib.suppress(ConnectionResetError):  # The feed closed it without reading the request.
            assert stranger.recv(1) == b""
        assert not given


def test_it_serves_on_after_it_had_no_descriptor_for_a_connection(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failures = [OSError(errno.EMFILE, os.strerror(errno.EMFILE)) for _ in range(2)]
    accept = socket.socket.accept

    def accept_later(listener: socket.socket) -> Any:
        if failures:
            raise failures.pop()
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", accept_later)
    with feeding(numbers()) as feed, client_of(feed) as client:
        assert client.example() == _feed.dumped(element(0))
    assert caplog.text.count("Too many open files") == 2


def test_a_generator_without_elements_is_refused() -> None:
    with feeding(numbers(0)) as feed, pytest.raises(accelmgr.DataError, match="no elements"):
        Elements(feed.address, OPTIONS)


def test_elements_that_were_consumed_are_only_counted() -> None:
    with feeding(numbers()) as feed:
        consumed = 0
        feed.follow(lambda: consumed)
        first = Elements(feed.address, OPTIONS)
        for _ in range(100):
            first.next()
            consumed = 50
        second = Elements(feed.address, OPTIONS)
        for number in range(100):
            values = second.next()
            assert values is not None
            assert number < 50 or torch.equal(values[0], element(number)["x"])
        assert feed._next == 100
        second.restore("90")
        assert json.loads(second.state()) == {"elements": 90}
        values = second.next()
        assert values is not None and torch.equal(values[0], element(90)["x"])
        del first, second


def test_a_source_that_is_restored_further_on_skips_what_lies_before() -> None:
    with feeding(numbers()) as feed, client_of(feed) as client:
        client.example()
        assert client.get(500) == _feed.dumped(element(500))
        assert len(feed._kept) == 1


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12.0).reshape(3, 4).t(),
        torch.tensor(3),
        torch.tensor([True, False]),
        torch.empty(0, 5),
        torch.ones(3, dtype=torch.bfloat16),
        torch.tensor([1 + 2j]).conj(),
        torch.arange(1000)[5:7],
        torch.ones(2, requires_grad=True),
    ],
    ids=lambda tensor: f"{tensor.dtype}{list(tensor.shape)}",
)
def test_tensors_travel_as_their_values(tensor: torch.Tensor) -> None:
    import pickle

    data = _feed.dumped(tensor)
    assert len(data) < 400
    torch.testing.assert_close(pickle.loads(data), tensor.detach(), rtol=0, atol=0)
