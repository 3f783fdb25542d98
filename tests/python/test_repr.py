"""Checks that repr() of objects of the package tells their state, at any time and without an exception."""

import os
import select
import signal

import torch
from gate import Count, Told

import accelmgr


def test_a_manager_tells_its_state_runners_and_step(tmp_path):
    manager = accelmgr.Manager(Told(tmp_path), Count(), nprocs=2, runners__threads=1, start=False)
    assert repr(manager) == "<accelmgr.Manager not started>"
    with manager:
        assert repr(manager) == "<accelmgr.Manager running: 2 runners, step 0>"
        assert manager.step().ok
        assert manager.step().ok
        assert repr(manager) == "<accelmgr.Manager running: 2 runners, step 2>"
    assert repr(manager) == "<accelmgr.Manager stopped: step 2>"


def test_a_manager_whose_process_is_gone_tells_that(tmp_path):
    with accelmgr.Manager(Told(tmp_path), Count(), nprocs=1, runners__threads=1) as manager:
        assert repr(manager) == "<accelmgr.Manager running: 1 runner, step 0>"
        process = os.pidfd_open(manager.statistics().manager_pid)
        os.kill(manager.statistics().manager_pid, signal.SIGKILL)
        assert select.select([process], [], [], 30)[0]
        os.close(process)
        assert manager.step().status == "manager_lost"
        assert repr(manager) == "<accelmgr.Manager lost: its manager process is gone, step 0>"
        manager.recover()
        assert repr(manager) == "<accelmgr.Manager running: 1 runner, step 0>"


def test_no_manager_is_without_a_text(tmp_path):
    assert repr(object.__new__(accelmgr.Manager)) == "<accelmgr.Manager not started>"
    with accelmgr.Manager(Told(tmp_path), Count(), nprocs=1, runners__threads=1) as manager:
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(writer, repr(manager).encode())
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as told:
            assert told.read() == "<accelmgr.Manager of another process>"
        os.waitpid(child, 0)


def test_a_manager_of_another_class_is_told_by_its_name():
    manager = accelmgr.TPUManager(torch.nn.Linear(2, 1), Count(), nprocs=1, start=False)
    assert repr(manager) == "<accelmgr.TPUManager not started>"


def test_what_a_manager_gives_out_tells_what_it_is(tmp_path):
    with accelmgr.Manager(
        Told(tmp_path),
        Count(),
        nprocs=1,
        runners={"threads": 1, "on_loss": "fail"},
        checkpoint__directory=str(tmp_path / "ck"),
    ) as manager:
        assert manager.step().ok
        manager.save_checkpoint()
        (written,) = manager.checkpoints_written(60)
        assert repr(written) == f"CheckpointWritten(step 1: {written.path})"
        statistics = manager.statistics()
        assert repr(statistics) == "Statistics(1 steps, 1 attempts, 1 samples, 0 losses, 1 runners)"
        assert repr(statistics.runners[0]).startswith(f"RunnerStatistics(rank 0, pid {statistics.runners[0].pid}, ")
        manager.model.tell("die")
        (cause,) = manager.step().causes
        assert repr(cause) == "FailureCause(rank 0, step 2, phase forward: killed by signal 9 (KILL))"
