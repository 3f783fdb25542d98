"""Checks that the program never deletes or overwrites a user's file in the place of its error report."""

import json

import pytest
from conftest import DONE, FAILED

OURS = "accelmgr-error.json"
GOOD_RUNS = {"train": "accelmgr train -c small.yaml", "spawn": "accelmgr spawn --nprocs 1 -- true"}
BAD_RUNS = {
    "train": "accelmgr train -c small.yaml --set 'faults=rank=0 step=2 phase=backward fault=kill' --set "
             "runners.on_loss=fail",
    "spawn": "accelmgr spawn --nprocs 1 -- false",
}
commands = pytest.mark.parametrize("command", ["train", "spawn"])


@commands
@pytest.mark.parametrize("runs", [GOOD_RUNS, BAD_RUNS], ids=["good", "bad"])
def test_files_of_the_user_s_stay_as_they_are(person, command, runs):
    names = ["error.json", "error.json.tmp", OURS, f"{OURS}.tmp"]
    for name in names:
        person.file(name).write_text("mine")
    person.types(runs[command])
    assert {person.file(name).read_text() for name in names} == {"mine"}


@commands
def test_a_failure_is_reported_under_a_name_of_its_own_until_a_run_goes_well(person, command):
    ended = person.types(BAD_RUNS[command])
    assert ended.code == FAILED, ended.err
    assert person.files() == {OURS}
    assert json.loads(person.file(OURS).read_text())["accelmgr"] == "error report"
    assert person.types(GOOD_RUNS[command]).code == DONE
    assert person.files() == set()


@commands
def test_who_has_taken_the_name_of_the_report_is_told_so_once(person, command):
    person.file(OURS).write_text("{}")
    ended = person.types(BAD_RUNS[command])
    assert ended.code == FAILED, ended.err
    assert ended.err.count(f"warning: {OURS} is not a report of accelmgr and is left as it is") == 1
    assert person.file(OURS).read_text() == "{}"
    assert person.files() == {OURS}


def test_a_link_with_the_name_of_the_report_is_the_user_s(person):
    person.file("notes").write_text("mine")
    person.file(OURS).symlink_to("notes")
    assert person.types(BAD_RUNS["spawn"]).code == FAILED
    assert person.file(OURS).is_symlink()
    assert person.file("notes").read_text() == "mine"


def test_a_program_that_starts_again_and_again_touches_only_its_own_files(person):
    theirs = ["error.json", "error.json.tmp", "notes.txt", "attempt_0", "stdout.log", "core", ".hidden"]
    for name in theirs:
        person.file(name).write_text(f"{name} is mine")
    before = {name: person.file(name).stat() for name in theirs}
    script = "echo $TORCHELASTIC_RESTART_COUNT; exit $((TORCHELASTIC_RESTART_COUNT < 2))"
    ended = person.types(f"accelmgr spawn --nprocs 2 --max-restarts 2 --log-dir logs -- sh -c '{script}'")
    assert ended.code == DONE, ended.err
    assert "restart 2 of 2" in ended.err
    assert person.files() == {*theirs, "logs"}
    for name in theirs:
        assert person.file(name).read_text() == f"{name} is mine"
        assert person.file(name).stat().st_mtime_ns == before[name].st_mtime_ns
        assert person.file(name).stat().st_ino == before[name].st_ino


def test_the_error_file_of_a_rank_is_nothing_that_lies_in_a_folder(person):
    person.file("logs/attempt_0/0").mkdir(parents=True)
    person.file("logs/attempt_0/0/error.json").write_text("mine")
    script = 'echo "{\\"message\\": \\"no good\\"}" > $TORCHELASTIC_ERROR_FILE; exit 3'
    ended = person.types(f"accelmgr spawn --nprocs 1 --log-dir logs -- sh -c '{script}'")
    assert ended.code == 3
    assert "no good" in ended.err
    assert json.loads(person.file(f"logs/{OURS}").read_text())["first"]["what"] == "no good"
    assert person.file("logs/attempt_0/0/error.json").read_text() == "mine"
