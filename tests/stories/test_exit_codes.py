"""Checks exit codes: 2 for a wrong command or configuration, 1 for any other failure, failed output included."""

import os
import resource
import signal

import pytest
from conftest import DONE, FAILED

FULL = {
    "train": "accelmgr train -c small.yaml",
    "spawn": "accelmgr spawn --nprocs 1 -- echo hello",
    "the plan of spawn": "accelmgr spawn --nprocs 1 --print-config",
    "config show": "accelmgr config show",
    "config check": "accelmgr config check -c small.yaml",
    "config reference": "accelmgr config reference",
    "info": "accelmgr info",
    "help": "accelmgr --help",
    "help of a command": "accelmgr spawn --help",
    "version": "accelmgr --version",
}


@pytest.mark.parametrize("case", FULL)
def test_a_full_standard_output_is_no_success(person, case):
    with open("/dev/full", "w") as full:
        ended = person.types(FULL[case], stdout=full)
    assert ended.code == FAILED, ended.err
    assert ended.err.count("standard output could not be written: No space left on device") == 1
    assert ended.err.count("\n") == 1, ended.err


def test_a_plot_on_a_full_standard_output_is_no_success(person):
    pytest.importorskip("matplotlib")
    assert person.types("accelmgr train -c small.yaml --log run.jsonl").code == DONE
    with open("/dev/full", "w") as full:
        ended = person.types("accelmgr plot run.jsonl", stdout=full)
    assert ended.code == FAILED, ended.err
    assert ended.err == "accelmgr plot: standard output could not be written: No space left on device\n"
    assert person.files() == {"run.jsonl", "run.png"}


def test_a_training_on_a_full_standard_output_saves_what_it_has(person):
    with open("/dev/full", "w") as full:
        ended = person.types("accelmgr train -c small.yaml --checkpoint-dir ck", stdout=full)
    assert ended.code == FAILED, ended.err
    assert person.file("ck/step-00000010/model.safetensors").exists()


@pytest.mark.parametrize(
    "command",
    ["accelmgr train -c small.yaml --steps 200", "accelmgr spawn --nprocs 2 -- sh -c 'yes | head -100000'",
     "accelmgr config reference", "accelmgr --help", "accelmgr info"],
)
def test_a_reader_that_goes_away_is_no_crash(person, command):
    read_end, write_end = os.pipe()
    begun = person.begins(command, stdout=write_end)
    os.close(write_end)
    os.read(read_end, 1)
    os.close(read_end)
    _, err = begun.communicate(timeout=60)
    assert begun.returncode in (DONE, FAILED, -signal.SIGPIPE, 128 + signal.SIGPIPE)
    assert err == "" or "Broken pipe" in err
    assert person.files() == set()


LIMITS = [("accelmgr train -c small.yaml", limit) for limit in (8, 11, 16, 20, 24)] + [
    ("accelmgr spawn --nprocs 16 -- true", limit) for limit in (8, 12, 16, 24, 50)
]


@pytest.mark.parametrize(("command", "limit"), LIMITS)
def test_too_many_open_files_say_which_limit_to_raise(person, command, limit):
    ended = person.types(command, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit)))
    assert ended.code == FAILED, ended.text
    assert f"raise ulimit -n (now {limit})" in ended.err


def test_a_rendezvous_that_fails_is_a_failure(person):
    where = f"--nnodes 2 --rendezvous 127.0.0.1:{person.reserved_port()} --rendezvous-timeout 2"
    ended = person.types(f"accelmgr spawn --nprocs 1 {where} -- true")
    assert ended.code == FAILED, ended.err
    assert "node 1 missing" in ended.err
