"""Checks the messages for wrong options: each names what was typed and what would be right."""

import os

import pytest
from conftest import DONE, USAGE

TRAIN = "accelmgr train -c small.yaml"
SPAWN_TRUE = "-- sh -c 'echo started'"

WRONG = {
    "text for a number": (f"{TRAIN} --steps abc", "--steps is 'abc'; it must be a whole number of at least 1"),
    "too many runners": (f"{TRAIN} --runners 25", "--runners is '25'; it must be a whole number from 1"),
    "checkpoints nowhere": (
        f"{TRAIN} --checkpoint-every 5", "--checkpoint-every is 5, but --checkpoint-dir is empty",
    ),
    "latest of nothing": (f"{TRAIN} --resume latest", "--resume is 'latest', but --checkpoint-dir is empty"),
    "a mistyped option": (f"{TRAIN} --stesp 5", "unknown option '--stesp'; did you mean '--steps'?"),
    "a mistyped option alone": (
        "accelmgr train --confg small.yaml", "unknown option '--confg'; did you mean '--config'?",
    ),
    "a mistyped option with a value": (
        f"{TRAIN} --checkpoint-dri=ck", "unknown option '--checkpoint-dri'; did you mean '--checkpoint-dir'?",
    ),
    "an option like none": (f"{TRAIN} --zzzzzzzz", "unknown option '--zzzzzzzz'; accelmgr train --help lists them"),
    "a word too many": (f"{TRAIN} 5", "unexpected argument '5'"),
    "a mistyped command": ("accelmgr trian -c small.yaml", "unknown command 'trian'; did you mean 'train'?"),
    "a command like none": (
        "accelmgr frobnicate",
        ("unknown command 'frobnicate'; the commands are train, spawn, serve, status, list, step, pending, cancel, "
         "events, checkpoint, resize, restart, stop, trace, top"),
    ),
    "a mistyped command of config": ("accelmgr config shwo", "unknown command 'shwo'; did you mean 'show'?"),
    "no command of config": ("accelmgr config", "a command is missing: show, check, reference"),
    "a mistyped option of config": (
        "accelmgr config show --confg small.yaml", "unknown option '--confg'; did you mean '--config'?",
    ),
    "no processes": (f"accelmgr spawn --nprocs 0 {SPAWN_TRUE}", "--nprocs is 0; it must be at least 1, or -1"),
    "a node too many": (
        f"accelmgr spawn --nnodes 2 --node-rank 2 --rendezvous 127.0.0.1:29500 {SPAWN_TRUE}",
        "--node-rank is 2; it must be 0 to 1, because --nnodes is 2",
    ),
    "no program": ("accelmgr spawn --nprocs 2", "PROGRAM is missing"),
    "no such program": ("accelmgr spawn -- no-such-program", "'no-such-program'"),
    "no folder": (f"accelmgr spawn --log-dir /dev/null/logs {SPAWN_TRUE}", "/dev/null/logs"),
    "no address": (f"accelmgr spawn --rendezvous nonsense {SPAWN_TRUE}", "--rendezvous: 'nonsense'"),
    "fewer GPUs than processes": (f"accelmgr spawn --nprocs 2 --gpus 0 {SPAWN_TRUE}", "--gpus is '0'"),
    "restarts": (
        f"accelmgr spawn --max-restarts -1 {SPAWN_TRUE}", "--max-restarts is '-1'; it must be a whole number from 0",
    ),
    "a mistyped option of spawn": (
        f"accelmgr spawn --nprosc 2 {SPAWN_TRUE}", "unknown option '--nprosc'; did you mean '--nprocs'?",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_was_typed_is_named_with_what_would_be_right(person, case):
    command, said = WRONG[case]
    ended = person.types(command)
    assert ended.code == USAGE, ended.text
    assert said in ended.err
    assert ended.out == ""
    assert person.files() == set()


@pytest.mark.parametrize(
    "options",
    ["--steps 9 --steps 3", "--set train.steps=9 --steps 3", "--steps 9 --set train.steps=3", "--steps=9 --steps=3"],
)
def test_the_last_of_a_repeated_option_wins(person, options):
    ended = person.types(f"{TRAIN} {options}")
    assert ended.code == DONE, ended.err
    assert "done: 3 steps" in ended.out


def test_the_last_configuration_file_wins(person):
    person.file("other.yaml").write_text("train.steps: 7\n")
    ended = person.types("accelmgr config show -c small.yaml -c other.yaml")
    assert ended.code == DONE, ended.err
    assert "file other.yaml:1" in ended.out and "small.yaml" not in ended.out


def test_the_last_of_two_names_of_one_option_wins(person):
    ended = person.types("accelmgr spawn --nprocs 3 --nproc-per-node 1 --no-prefix -- sh -c 'echo of $WORLD_SIZE'")
    assert (ended.code, ended.out) == (DONE, "of 1\n"), ended.err


@pytest.mark.parametrize(
    "command",
    ["accelmgr config check -c /dev/stdin < small.yaml", "cat small.yaml | accelmgr config check -c /dev/stdin",
     "accelmgr config check -c <(cat small.yaml)", "accelmgr config check -c /dev/null"],
)
def test_a_pipe_is_as_good_as_a_file(person, command):
    ended = person.types(f"bash -c '{command}'", env={"BASH_ENV": str(functions(person))})
    assert ended.code == DONE, ended.err
    assert ended.out.endswith(": ok\n")


def functions(person):
    """A file for bash to read first. It defines `accelmgr` as the program under test."""
    file = person.file("functions")
    file.write_text(f'accelmgr() {{ "{os.environ["ACCELMGR_PROGRAM"]}" "$@"; }}\n')
    return file
