"""Runs tools/examples/ray_managers.py with two actors on this machine.

Ray takes 240 MB, so tools/setup leaves it out of .venv: `tools/test --torch newest ray_example` runs this file.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile

import pytest
from plain_gpt import EXAMPLES, SMALL, losses_of
from programs import environment

pytest.importorskip("ray", reason="ray is not installed")

STEPS = 8
SECONDS = 300  # Time limit of a run; it needs a tenth of that.


def test_two_actors_have_the_losses_of_plain_torch() -> None:
    with tempfile.TemporaryDirectory(prefix="ray") as folder:  # Short: names of Ray's sockets begin with it.
        variables = {"RAY_TMPDIR": folder, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
        variables |= {"ACCELMGR_RUNNERS__THREADS": "1", "ACCELMGR_START_TIMEOUT": "240", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, str(EXAMPLES / "ray_managers.py"), *SMALL, f"--steps={STEPS}"],
            env=environment(**variables),
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    *steps, held_out = losses_of([(step, [0, 1]) for step in range(STEPS)], machines=2)
    printed = [float(number) for number in re.findall(r"\d\.\d{6}", done.stdout)]
    assert printed == pytest.approx([steps[-1], held_out, held_out], abs=1e-4), done.stdout
