"""Runs tools/examples/torch_optim.py as a user does. test_hivemind_example.py runs the examples of hivemind."""

from __future__ import annotations

import pathlib
import re

from programs import run

ROOT = pathlib.Path(__file__).resolve().parents[2]
SMALL = ["model.gpt.layers=2", "model.gpt.width=32", "model.gpt.context=32", "data.sequence_length=32"]
LINE = re.compile(r"step (\d+): loss ([\d.]+), (\d+) samples, \d+ ms")


def test_torch_optim_trains_the_built_in_gpt_by_an_optimizer_of_torch(tmp_path: pathlib.Path) -> None:
    example = str(ROOT / "tools" / "examples" / "torch_optim.py")
    code, out, err = run(example, "--steps", "60", "--set", *SMALL, cwd=tmp_path)
    assert code == 0, err
    assert re.fullmatch(r"the configuration sets keys that a Manager does not read: optimizer\.[^\n]*\n", err), err
    lines = [LINE.fullmatch(line) for line in out.splitlines()]
    assert all(lines), out
    steps = [(int(line[1]), float(line[2]), int(line[3])) for line in lines if line]
    assert [step for step, _, _ in steps] == [20, 40, 60]
    samples = steps[0][2]
    assert samples > 0 and all(each == samples for _, _, each in steps), out
    assert steps[0][1] - steps[-1][1] > 0.3, out
