"""Checks what the program prints on a terminal, and that standard input goes to rank 0."""

import os
import pty

import pytest
from conftest import DONE


def seen_on_a_terminal(person, command, **env):
    """Runs a command on a pseudo-terminal and returns all its output."""
    ours, theirs = pty.openpty()
    begun = person.begins(command, stdout=theirs, stderr=theirs, env=env)
    os.close(theirs)
    seen = b""
    try:
        while piece := os.read(ours, 65536):
            seen += piece
    except OSError:  # The last writer has closed the terminal.
        pass
    os.close(ours)
    assert begun.wait(60) == DONE, seen
    return seen.decode()


def test_progress_is_one_line_that_is_rewritten(person):
    assert "\r\x1b[K" in seen_on_a_terminal(person, "accelmgr train -c small.yaml", TERM="xterm")


@pytest.mark.parametrize("kind", ["dumb", ""])
def test_a_terminal_that_knows_no_escapes_gets_none(person, kind):
    seen = seen_on_a_terminal(person, "accelmgr train -c small.yaml", TERM=kind)
    assert "\x1b" not in seen
    assert "step 10/10" in seen


@pytest.mark.parametrize("env", [{"NO_COLOR": "1"}, {}], ids=["NO_COLOR", "none"])
@pytest.mark.parametrize("command", ["accelmgr train -c small.yaml", "accelmgr spawn --nprocs 1 -- echo hello"])
def test_nothing_is_coloured(person, command, env):
    seen = seen_on_a_terminal(person, command, TERM="xterm-256color", **env)
    assert not any(f"\x1b[{code}" in seen for code in "0123456789")


def test_standard_input_goes_to_rank_0(person):
    person.file("lines").write_text("one\ntwo\n")
    script = "while read line; do echo $line; done; echo end"
    with person.file("lines").open() as lines:
        ended = person.types(f"accelmgr spawn --nprocs 3 -- sh -c '{script}'", stdin=lines)
    assert ended.code == DONE, ended.err
    assert sorted(ended.out.splitlines()) == [
        "[rank 0] end", "[rank 0] one", "[rank 0] two", "[rank 1] end", "[rank 2] end",
    ]
