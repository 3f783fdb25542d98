"""Checks what repr() tells. test_failures.py has that of lost managers, test_handle.py that of forked ones."""

import torch
from gate import Count, Told
from saving import save

import accelmgr


def test_a_manager_tells_its_state_runners_and_step(tmp_path):
    assert repr(object.__new__(accelmgr.Manager)) == "<accelmgr.Manager not started>"
    manager = accelmgr.Manager(Told(tmp_path), Count(), nprocs=2, runners__threads=1, start=False)
    assert repr(manager) == "<accelmgr.Manager not started>"
    with manager:
        assert repr(manager) == "<accelmgr.Manager running: 2 runners, step 0>"
        assert manager.step().ok
        assert manager.step().ok
        assert repr(manager) == "<accelmgr.Manager running: 2 runners, step 2>"
    assert repr(manager) == "<accelmgr.Manager stopped: step 2>"


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
        written = save(manager)
        assert repr(written) == f"CheckpointWritten(step 1: {written.path})"
        statistics = manager.statistics()
        assert repr(statistics) == "Statistics(1 steps, 1 attempts, 1 samples, 0 losses, 1 runners)"
        assert repr(statistics.runners[0]).startswith(f"RunnerStatistics(rank 0, pid {statistics.runners[0].pid}, ")
        manager.model.tell("die")
        (cause,) = manager.step().causes
        assert repr(cause) == "FailureCause(rank 0, step 2, phase forward: killed by signal 9 (KILL))"
