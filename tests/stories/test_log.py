"""Checks the log of a run: it loses no line, and no other run writes to it."""

import json
import os
import resource
import signal

import pytest
from conftest import DONE, FAILED, USAGE
from records import checkpoint, checkpoints_in, lines_of, losses_of, numbers_of

TRAIN = "accelmgr train -c small.yaml --log l.jsonl"
SAVED = f"{TRAIN} --checkpoint-dir ck --checkpoint-every 5"


def test_lines_past_the_resumed_step_and_a_torn_one_go(person):
    assert person.types(SAVED).code == DONE
    before = losses_of(person.file("l.jsonl"))
    with person.file("l.jsonl").open("a") as log:
        log.write('{"step":11,"att')
    ended = person.types(f"{SAVED} --resume {checkpoint(person.file('ck'), 5)}")
    assert ended.code == DONE, ended.err
    assert numbers_of(person.file("l.jsonl")) == list(range(1, 11))
    assert losses_of(person.file("l.jsonl")) == before
    assert len(lines_of(person.file("l.jsonl"))) == 11


def test_a_new_run_replaces_a_log_only_if_it_is_told_to_and_when_it_begins(person):
    assert person.types(TRAIN).code == DONE
    before = person.file("l.jsonl").read_bytes()
    ended = person.types(TRAIN)
    assert ended.code == USAGE
    assert "--log l.jsonl: the file holds the log of an earlier run" in ended.err
    assert "--overwrite" in ended.err and "--resume" in ended.err
    assert "step 1/" not in ended.out
    ended = person.types(f"{TRAIN} --overwrite --set model.kind=mpl")
    assert ended.code != DONE and "mpl" in ended.err
    assert person.file("l.jsonl").read_bytes() == before
    assert person.types(f"{TRAIN} --steps 3 --overwrite").code == DONE
    assert numbers_of(person.file("l.jsonl")) == [1, 2, 3]


@pytest.mark.parametrize("option", ["", "--checkpoint-dir ck --resume latest"])
def test_a_file_that_is_no_log_stays_as_it_is(person, option):
    person.file("l.jsonl").write_text('{"name": "somebody else\'s"}\n')
    ended = person.types(f"{TRAIN} {option}")
    assert ended.code == USAGE
    assert "--log l.jsonl: the file is not a log of `accelmgr train`" in ended.err and "--overwrite" in ended.err
    assert person.file("l.jsonl").read_text() == '{"name": "somebody else\'s"}\n'


def test_the_log_of_another_run_is_not_cut(person):
    assert person.types(TRAIN).code == DONE
    before = person.file("l.jsonl").read_bytes()
    ended = person.types(f"{TRAIN} --checkpoint-dir ck --resume latest")
    assert ended.code == USAGE
    assert "--log l.jsonl: it is the log of another run" in ended.err and "--overwrite" in ended.err
    assert "step 1/" not in ended.out
    assert person.file("l.jsonl").read_bytes() == before
    assert checkpoints_in(person.file("ck")) == []


def test_a_log_of_which_a_line_was_edited_is_not_cut(person):
    assert person.types(SAVED).code == DONE
    lines = person.file("l.jsonl").read_text().splitlines(keepends=True)
    person.file("l.jsonl").write_text("".join([*lines[:3], "here the loss jumps\n", *lines[3:]]))
    before = person.file("l.jsonl").read_bytes()
    ended = person.types(f"{SAVED} --steps 12 --resume latest")
    assert ended.code == USAGE
    assert "--log l.jsonl: line 4 was not written by `accelmgr train`" in ended.err
    assert person.file("l.jsonl").read_bytes() == before


def test_two_runs_do_not_write_one_log(person):
    person.trains(f"{TRAIN} --steps 1000000 --set grad_accumulation_steps=500")
    ended = person.types(f"{TRAIN} --overwrite")
    assert ended.code == USAGE
    assert "--log l.jsonl: another run is writing it" in ended.err
    assert numbers_of(person.file("l.jsonl"), grows=True)[0] == 1


def test_a_log_to_standard_output_is_alone_there(person):
    ended = person.types("accelmgr train -c small.yaml --log -")
    assert ended.code == DONE, ended.err
    lines = [json.loads(line) for line in ended.out.splitlines()]
    assert [line["step"] for line in lines[:-1]] == list(range(1, 11))
    assert lines[-1]["run"]["ended"] == "done"
    assert "step 10/10" in ended.err and "done: 10 steps" in ended.err
    assert person.files() == set()


def test_a_log_on_a_full_disk_does_not_end_the_run(person):
    ended = person.types("accelmgr train -c small.yaml --log /dev/full --checkpoint-dir ck")
    assert ended.code == FAILED
    assert "done: 10 steps" in ended.out
    why = "No space left on device"
    assert ended.err.splitlines() == [
        f"accelmgr: warning: --log /dev/full cannot be written from step 1 on: {why}; training goes on",
        f"accelmgr: --log /dev/full lacks steps 1 to 10, the end of the run: {why}",
    ]
    assert checkpoints_in(person.file("ck")) == [10]


def test_a_log_whose_disk_has_room_again_goes_on_with_whole_lines(person):
    """A limit on file sizes stands for a full disk; the test raises it later."""
    limit = 1 << 30
    run = person.begins(f"{TRAIN} --steps 1000000 --set grad_accumulation_steps=50")
    log = person.file("l.jsonl")

    def read_until(stream, part):
        for line in stream:
            if part in line:
                return line
        raise AssertionError(f"'{part}' was not said")

    read_until(run.stdout, "step 3/")
    small = log.stat().st_size + 100  # Less than a line.
    resource.prlimit(run.pid, resource.RLIMIT_FSIZE, (small, limit))
    warning = read_until(run.stderr, "cannot be written")
    first = int(warning.partition("from step ")[2].split()[0])
    assert "File too large" in warning
    resource.prlimit(run.pid, resource.RLIMIT_FSIZE, (limit, limit))
    while (before := numbers_of(log, grows=True))[-1] < first:
        assert run.poll() is None
        read_until(run.stdout, "step ")
    os.kill(run.pid, signal.SIGINT)
    out, err = run.communicate(timeout=60)
    assert run.returncode == FAILED, out + err
    numbers = numbers_of(log)
    assert numbers[: len(before)] == before
    gap = sorted(set(range(1, numbers[-1] + 1)) - set(numbers))
    assert gap[0] == first and gap == list(range(gap[0], gap[-1] + 1))
    lacking = f"step {first}" if len(gap) == 1 else f"steps {first} to {gap[-1]}"
    assert f"accelmgr: --log l.jsonl lacks {lacking}: File too large" in err
    assert lines_of(log)[-1]["run"]["ended"] == "interrupted"
