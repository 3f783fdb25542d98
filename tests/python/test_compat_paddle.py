"""Checks that accelmgr.compat.paddle_spawn behaves as paddle.distributed.spawn does."""

from __future__ import annotations

import multiprocessing.connection
import os
import queue
import signal
import subprocess
import time
from typing import Any

import pytest
from launching import is_gone

import accelmgr
from accelmgr import _native, distributed
from accelmgr.compat.paddle_spawn import MultiprocessContext, spawn

_native.SerialExecutor("any")  # A process keeps this memory: opens it before tests count descriptors.


def _train(word: str = "none") -> tuple[Any, ...]:
    return (
        word,
        distributed.get_rank(),
        distributed.all_reduce(1),
        os.environ["ACCELMGR_TRAINER_ID"],
        "http_proxy" in os.environ,
        os.getpid(),
    )


@pytest.mark.parametrize("method", [None, "fork", "forkserver"])
def test_functions_get_their_arguments_alone_and_return_values(monkeypatch: Any, method: str | None) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    context = spawn(_train, ["yes"], nprocs=2, start_method=method)
    assert isinstance(context, MultiprocessContext)
    assert [result[:5] for result in context.results] == [("yes", 0, 2, "0", False), ("yes", 1, 2, "1", False)]
    assert [result[5] for result in context.results] == context.pids() == [p.pid for p in context.processes]
    assert [process.exitcode for process in context.processes] == [0, 0]
    assert not any(process.is_alive() for process in context.processes)
    assert [not queue.empty() and queue.get()[0] for queue in context.return_queues] == ["yes", "yes"]
    assert all(queue.empty() for queue in context.return_queues)
    assert context.join()


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_one_process_is_a_process_too(method: str) -> None:
    context = spawn(_train, nprocs=1, start_method=method)
    assert context.results[0][-1] == context.pids()[0] != os.getpid() and context.results[0][:3] == ("none", 0, 1)


def _wait() -> None:
    signal.pause()


def test_join_with_a_timeout_says_whether_all_have_ended() -> None:
    context = spawn(_wait, nprocs=2, join=False, daemon=True, start_method="fork")
    assert context.join(0.05) is False
    assert all(process.is_alive() and process.daemon and process.exitcode is None for process in context.processes)
    context.terminate()
    assert context.join() is True
    assert [process.exitcode for process in context.processes] == [-signal.SIGTERM] * 2


def _wait_in_rank_1() -> None:
    if distributed.get_rank() == 1:
        signal.pause()


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_terminate_reaches_no_other_process_that_has_the_number_by_now(method: str) -> None:
    context = spawn(_wait_in_rank_1, nprocs=2, join=False, daemon=True, start_method=method)
    ended = context.processes[0]
    deadline = time.monotonic() + 60
    while not is_gone(ended.pid):
        assert not context.join(0.01) and time.monotonic() < deadline
    ended.terminate()
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as other:
        ended.pid = other.pid
        ended.terminate()
        other.communicate()
        assert other.returncode == 0
    context.terminate()


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_processes_are_seen_to_end_without_a_join(method: str) -> None:
    context = spawn(_wait_in_rank_1, nprocs=2, join=False, daemon=True, start_method=method)
    first, second = context.processes
    while context.return_queues[0].empty():
        pass
    assert context.return_queues[0].get() is None, "it does not wait for rank 1"
    assert context.return_queues[1].empty()
    assert multiprocessing.connection.wait([first.sentinel, second.sentinel], 60) == [first.sentinel]
    assert (first.exitcode, first.is_alive(), second.is_alive()) == (0, False, True)
    assert context.sentinels == {second.sentinel: 1}
    second.join(0.01)
    assert second.exitcode is None
    second.kill()
    while any(process.is_alive() for process in context.processes):
        pass
    second.join()
    assert second.exitcode == -signal.SIGKILL and context.sentinels == {}
    with pytest.raises(accelmgr.SpawnError, match=r"rank 1 was killed by signal 9 \(KILL\)"):
        context.join()


def test_the_queue_of_a_failed_process_has_its_trace() -> None:
    context = spawn(_fail, ("raise",), nprocs=2, join=False, daemon=True, start_method="fork")
    failed, running = context.error_queues
    assert "RuntimeError: no card" in failed.get() and failed.empty() and running.empty()
    context.terminate()
    with pytest.raises(queue.Empty):
        running.get()


def _fail(how: str) -> None:
    if distributed.get_rank() == 0:
        if how == "raise":
            raise RuntimeError("no card")
        os._exit(3)
    signal.pause()


def test_an_exit_code_is_named() -> None:
    context = spawn(_fail, ("exit",), nprocs=2, join=False, start_method="fork")
    with pytest.raises(accelmgr.SpawnError, match="rank 0 ended with exit code 3"):
        context.return_queues[0].get()
    assert [process.exitcode for process in context.processes] == [3, -signal.SIGTERM]
    assert context.return_queues[0].empty()


def test_an_option_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown option 'backnd'.*backend"):
        spawn(_train, nprocs=2, join=False, backnd="gloo")


def test_a_deprecated_option_warns_and_works() -> None:
    with pytest.warns(DeprecationWarning, match="the option cluster_node_ips of spawn"):
        context = spawn(_train, nprocs=2, start_method="fork", cluster_node_ips="127.0.0.1")
    assert [result[1] for result in context.results] == [0, 1]
