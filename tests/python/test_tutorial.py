"""The programs of the tutorial print what it says, to the digit but for times."""

from __future__ import annotations

import pathlib
import re

from programs import run_script

TUTORIAL = pathlib.Path(__file__).resolve().parents[2] / "tools" / "examples" / "README.md"


def section(title: str) -> str:
    found = re.search(rf"^## \d+\. {re.escape(title)}\n(.*?)^## ", TUTORIAL.read_text(), re.MULTILINE | re.DOTALL)
    assert found, f"the tutorial has no section '{title}'"
    return found[1]


def block(text: str, begin: str) -> str:
    """The first block of `text` whose first line begins with `begin`."""
    found = re.search(rf"^```\w*\n({begin}[^\n]*\n.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert found, f"there is no block that begins with {begin}"
    return found[1]


def lines(printed: str) -> list[str]:
    """Those that begin with a step, without times."""
    return [re.sub(r"[\d.]+ ms", "T ms", line.rstrip()) for line in printed.splitlines() if line.startswith("step ")]


def of_a_loop(program: str) -> str:
    return program[program.index("        for result in manager.steps(") :]


def printed_by(program: str, folder: pathlib.Path, *arguments: str) -> list[str]:
    code, out, err = run_script(program, *arguments, cwd=folder)
    assert code == 0, err
    return lines(out)


def test_the_programs_print_what_the_tutorial_says(tmp_path: pathlib.Path) -> None:
    model, killing, saving = section("A model of your own"), section("Kill a runner"), section("Save and resume")
    first = block(model, "import torch")
    (tmp_path / "first.py").write_text(first)
    shown = lines(block(model, r"\$ python first.py"))
    assert printed_by(first, tmp_path) == shown
    inner = block(model, r"        for result in manager.steps\(")
    assert "sync_every=50" in inner
    assert printed_by(first.replace(of_a_loop(first), inner), tmp_path) == shown

    killed = first.replace(of_a_loop(first), block(killing, r"        for result in manager.steps\("))
    assert printed_by("import os, signal\n" + killed, tmp_path) == lines(block(killing, r"[\d:.]+ warning"))

    saved = block(saving, "import sys")
    printed = printed_by(saved, tmp_path, "100") + printed_by(saved, tmp_path, "200")
    assert printed == lines(block(saving, r"\$ python saved.py 100"))
