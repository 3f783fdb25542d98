"""tools/examples/moving.md: what ports print, beside the plain programs; and the differences that it shows."""

from __future__ import annotations

import functools
import pathlib
import re
import subprocess
import sys

import pytest
from programs import BOUND_S, environment

EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "tools" / "examples"
NAMES = ["mnist", "word_language_model", "dcgan"]
CLOSE = {"mnist": 0.2, "word_language_model": 1e-5, "dcgan": 1e-5}  # Runners draw dropout each for itself.
DIFF = [
    "diff",
    "-U0",
    "-F",
    "^ *def ",
    "-I",
    "^import accelmgr$",
    "-I",
    "^$",
]  # Without the line that imports accelmgr.


@functools.cache
def printed(program: str, runners: int) -> str:
    one_thread = {"OMP_NUM_THREADS": "1", "ACCELMGR_RUNNERS__THREADS": "1"}  # With others, sums have another order.
    done = subprocess.run(
        [sys.executable, "-B", str(EXAMPLES / f"{program}.py")],
        capture_output=True,
        text=True,
        timeout=BOUND_S,
        env=environment(**one_thread, ACCELMGR_NPROCS=str(runners)),
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def numbers(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"\d+\.?\d*", text)]


@pytest.mark.parametrize("name", NAMES)
def test_with_one_runner_a_port_prints_what_the_plain_program_prints(name: str) -> None:
    expected = printed(f"{name}_plain", 0)
    assert len(expected.splitlines()) >= 3, expected
    assert printed(name, 1) == expected


@pytest.mark.parametrize("name", NAMES)
def test_with_two_runners_the_numbers_are_close(name: str) -> None:
    assert numbers(printed(name, 2)) == pytest.approx(numbers(printed(f"{name}_plain", 0)), rel=CLOSE[name])


@pytest.mark.parametrize("name", NAMES)
def test_the_page_shows_the_difference_of_the_files(name: str) -> None:
    command = [*DIFF, f"{name}_plain.py", f"{name}.py"]
    found = subprocess.run(command, cwd=EXAMPLES, capture_output=True, text=True).stdout
    difference = "".join(found.splitlines(keepends=True)[2:])  # Without the names of the files.
    assert difference
    assert f"```diff\n{difference}```\n" in (EXAMPLES / "moving.md").read_text(), f"it is now:\n{difference}"
