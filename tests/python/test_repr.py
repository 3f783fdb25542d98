"""Checks what repr() tells. test_failures.py has that of lost managers, test_handle.py that of forked ones."""

from gate import Count, Told
from saving import save

import accelmgr


def test_a_manager_and_what_it_gives_out_tell_what_they_are(tmp_path):
    assert repr(object.__new__(accelmgr.TPUManager)) == "<accelmgr.TPUManager not started>"
    folder, runners = str(tmp_path / "ck"), {"threads": 1, "on_loss": "fail"}
    manager = accelmgr.Manager(
        Told(tmp_path), Count(), nprocs=2, runners=runners, checkpoint__directory=folder, start=False
    )
    assert repr(manager) == "<accelmgr.Manager not started>"
    with manager:
        assert repr(manager) == "<accelmgr.Manager running: 2 runners, step 0>"
        assert manager.step().ok
        assert repr(manager) == "<accelmgr.Manager running: 2 runners, step 1>"
        written = save(manager)
        assert repr(written) == f"CheckpointWritten(step 1: {written.path})"
        statistics = manager.statistics()
        assert repr(statistics) == "Statistics(1 steps, 1 attempts, 2 samples, 0 losses, 2 runners)"
        assert repr(statistics.runners[0]).startswith(f"RunnerStatistics(rank 0, pid {statistics.runners[0].pid}, ")
        manager.model.tell("die")
        (cause,) = manager.step().causes
        assert repr(cause) == f"FailureCause(rank {cause.rank}, step 2, phase forward: killed by signal 9 (KILL))"
    assert repr(manager) == "<accelmgr.Manager stopped: step 1>"
