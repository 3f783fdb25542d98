"""Tests of places where a user may define models and datasets and start a manager: scripts, shells, notebooks."""

import contextlib
import importlib.util
import json
import os
import pty
import select
import sys
import textwrap
import time

import pytest
from programs import BOUND_S, environment, run, run_script

DEFINITIONS = """\
import accelmgr, torch
SCALE = 2.0

def scaled(x):
    return x * SCALE

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))
    def forward(self, x):
        return (self.weight * scaled(x)).sum()

class Data:
    def __iter__(self):
        while True:
            yield torch.tensor([1.0, 3.0])

"""
STEP = """\
manager = accelmgr.Manager(Net(), Data(), nprocs=1, runners__threads=1)
print("gradient", manager.step().loss, manager.model.weight.grad.tolist())
manager.stop()
"""
EXPECTED = "gradient 8.0 [2.0, 6.0]"


FORGETS = (
    STEP.replace("manager.stop()\n", "").replace("Manager(", "TPUManager(").replace("runners__threads=1", "start=True")
)
SCRIPTS = {
    # The manager and its runners do not run the script again.
    "without_a_guard": (DEFINITIONS + 'print("once")\n' + STEP, ["once", EXPECTED]),
    "that_forgets_to_stop": (DEFINITIONS + FORGETS, [EXPECTED]),
    "beside_a_module": ("from mine import *\n" + STEP, [EXPECTED]),
}


@pytest.mark.parametrize("kind", SCRIPTS)
def test_a_script(tmp_path, kind):
    script, lines = SCRIPTS[kind]
    (tmp_path / "mine.py").write_text(DEFINITIONS)
    code, out, err = run_script(script, cwd=tmp_path)
    assert (code, out.splitlines(), err) == (0, lines, "")


def test_a_script_that_raises_ends_with_its_own_error(tmp_path):
    raises = STEP.replace("manager.stop()", "raise LookupError('my own')")
    code, out, err = run_script(DEFINITIONS + raises, cwd=tmp_path)
    assert (code, out.splitlines()) == (1, [EXPECTED])
    assert err.splitlines()[-1] == "LookupError: my own" and "accelmgr" not in err


def test_a_command_line(tmp_path):
    code, out, err = run("-c", DEFINITIONS + STEP, cwd=tmp_path)
    assert (code, out.splitlines(), err) == (0, [EXPECTED], "")


def test_the_interactive_interpreter(tmp_path):
    """The lines are typed into Python on a pseudo-terminal."""
    pid, terminal = pty.fork()
    if pid == 0:
        try:
            os.chdir(tmp_path)
            os.execve(sys.executable, [sys.executable, "-q"], {**environment(), "TERM": "dumb"})
        finally:
            os._exit(127)
    said = b""
    try:
        # In the interpreter a blank line ends a definition. No definition here has one inside.
        for line in (*(DEFINITIONS + STEP).splitlines(), "exit()"):
            os.write(terminal, line.encode() + b"\n")
        deadline = time.monotonic() + BOUND_S
        with contextlib.suppress(OSError):  # EIO: the interpreter has ended.
            while select.select([terminal], [], [], max(0, deadline - time.monotonic()))[0]:
                said += os.read(terminal, 65536)
    finally:
        os.close(terminal)  # Sends SIGHUP to an interpreter that still runs.
        _, status = os.waitpid(pid, 0)
    assert EXPECTED in said.decode(), said.decode()
    assert os.waitstatus_to_exitcode(status) == 0


@pytest.mark.skipif(
    importlib.util.find_spec("ipykernel") is None or importlib.util.find_spec("jupyter_client") is None,
    reason="ipykernel or jupyter_client is not there",
)
def test_a_notebook(tmp_path):
    cells = json.dumps([DEFINITIONS, STEP])
    (tmp_path / "client.py").write_text(
        textwrap.dedent(f"""\
            import os
            from jupyter_client.manager import KernelManager
            kernel = KernelManager(kernel_name="python3", transport="ipc", ip=os.path.abspath("kernel"))
            kernel.start_kernel()
            client = kernel.client()
            client.start_channels()
            try:
                client.wait_for_ready(timeout={BOUND_S})
                for cell in {cells}:
                    client.execute_interactive(cell, timeout={BOUND_S}, allow_stdin=False)
            finally:
                client.stop_channels()
                kernel.shutdown_kernel(now=True)
            """)
    )
    code, out, err = run("client.py", cwd=tmp_path)
    assert code == 0 and EXPECTED in out, err
