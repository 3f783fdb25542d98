"""Checks what ACCELMGR_LOG_LEVEL makes the program say about its processes."""

import re

from conftest import DONE

LINE = re.compile(r"\d\d:\d\d:\d\d\.\d{3} (info|warning|debug) \[(host|manager|fork server|rank \d+) step \d+\] \S")


def lines_of(ended):
    lines = ended.err.splitlines()
    for line in lines:
        assert LINE.match(line), line
    return lines


def saying(lines, *parts):
    return [line for line in lines if all(part in line for part in parts)]


def test_info_shows_the_life_of_processes_and_checkpoints_and_nothing_of_every_step(person):
    ended = person.types("accelmgr train -c small.yaml --set checkpoint.directory=ck "
                         "--set 'faults=rank=1 step=3 phase=forward fault=kill'", env={"ACCELMGR_LOG_LEVEL": "info"})
    assert ended.code == DONE, ended.text
    lines = lines_of(ended)
    assert saying(lines, "[host step 0]", "a manager is started (spawn)", "model 'mlp'", "2 runners")
    assert saying(lines, "[manager step 0]", "the manager (pid ", "its fork server is process ")
    assert saying(lines, "[manager", "the session has ", "MiB")
    for rank, starts in ((0, 1), (1, 2)):
        assert len(saying(lines, "[manager", f"runner {rank} (pid ", "was forked by the fork server")) == starts
        assert len(saying(lines, "[manager", f"runner {rank} (pid ", "is ready")) == starts
    assert len(saying(lines, "[host step 1]", "2 runners ready")) == 1
    assert len(saying(lines, "[host step 11]", "a checkpoint of step 10 is handed to the manager")) == 1
    assert len(saying(lines, "[manager step 11]", "the checkpoint of step 10 is on the disk", "step-00000010")) == 1
    assert saying(lines, "[manager step 11]", "the runners are stopped: the host asked for it")
    assert saying(lines, "[host step 11]", "all processes have ended; the manager: exit code 0")
    assert (person.file("ck") / "step-00000010").is_dir()
    assert saying(lines, "warning [manager step 3]", "runner 1 (pid ", "killed by signal 9 (KILL) in phase forward")
    assert saying(lines, "info [manager step 3]", "runner 1 will be replaced in 0 ms")
    assert saying(lines, "info [host step 3]", "attempt 3 ended without a result: runner_lost")
    assert len(saying(lines, "[manager step 3]", "runner 1 (pid ", "is ready")) == 1
    assert len(lines) < 30, ended.err


def test_debug_shows_attempts_and_votes_of_every_step(person):
    ended = person.types("accelmgr train -c small.yaml --steps 3", env={"ACCELMGR_LOG_LEVEL": "debug"})
    assert ended.code == DONE, ended.text
    lines = lines_of(ended)
    for step in (1, 2, 3):
        assert saying(lines, f"debug [host step {step}]", f"attempt {step} is open")
        assert saying(lines, f"debug [host step {step}]", "ok: loss ")
        for rank in (0, 1):
            assert saying(lines, f"debug [rank {rank} step {step}]", f"attempt {step} begins")
            assert saying(lines, f"debug [rank {rank} step {step}]", f"attempt {step}: votes, with loss ")
            assert saying(lines, f"debug [rank {rank} step {step}]", f"attempt {step} is committed")
