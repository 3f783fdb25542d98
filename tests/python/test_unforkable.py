"""Checks managers whose host cannot be forked, or cannot any more: it has used CUDA, or autograd has threads."""

from __future__ import annotations

import logging
import os
import pathlib
import subprocess
import sys

import pytest
import torch
import torch.utils.backend_registration
from gate import Count, Told
from launching import kill
from programs import run_script

import accelmgr
from accelmgr import _native
from accelmgr._host import start_method

FAKE_DRIVER = pathlib.Path(_native.__file__).parents[2] / "tests/engine/support/fake_driver"


def test_a_process_that_has_initialized_cuda_is_not_forked():
    """As torch.cuda.is_available() does where there is a GPU: the driver, but not torch.cuda."""
    script = """if True:
        import ctypes
        from accelmgr._host import start_method
        assert start_method.chosen("auto", "xla") == ("spawn", "runners.device is xla")
        assert start_method.chosen("auto", "cuda") == ("fork", "")
        driver = ctypes.CDLL("libcuda.so.1")
        assert start_method.chosen("auto", "cuda") == ("fork", "")
        driver.cuInit(0)
        assert start_method.chosen("fork", "cuda") == ("fork", ""), "it was asked for"
        method, why = start_method.chosen("auto", "cuda")
        assert method == "spawn" and "has initialized CUDA" in why, (method, why)"""
    found = {"LD_LIBRARY_PATH": str(FAKE_DRIVER), "FAKE_DRIVER_GPUS": "1"}
    subprocess.run([sys.executable, "-c", script], env={**os.environ, **found}, check=True)


@pytest.mark.parametrize("lost", [False, True])
def test_a_host_that_cannot_be_forked_any_more_executes_other_processes(tmp_path, monkeypatch, caplog, lost):
    model = Told(tmp_path)
    with accelmgr.Manager(model, Count(), nprocs=2, runners__restart_backoff=0.01) as manager:
        assert manager.step(accumulate=False).ok
        monkeypatch.setattr(start_method, "_has_initialized_cuda", lambda: True)
        with caplog.at_level(logging.WARNING, "accelmgr"):
            if lost:
                kill(manager.statistics().manager_pid)
                assert manager.step(accumulate=False).status == "manager_lost"
                manager.recover()
            else:
                manager.refresh()
        assert "start_method is 'spawn', not 'fork', because this process has initialized CUDA" in caplog.text
        assert manager.step(accumulate=False).ok
        assert (4 * model.weight.grad[0]).round() == 2 + 3, "elements 2 and 3, exactly once"


LINE = """
import torch, torch.utils.backend_registration
import accelmgr
from accelmgr._host.start_method import other_threads

class Line(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))

    def forward(self, x):
        return {"loss": (self.weight * x).sum()}
"""

SCRIPT = (
    LINE
    + """
if __name__ == "__main__":
    torch.utils.backend_registration._setup_privateuseone_for_python_backend("npy")
    with accelmgr.Manager(Line(), [torch.ones(4)] * 100, nprocs=2) as manager:
        assert manager.step().loss == 4, manager.step().error
        Line()(torch.ones(4))["loss"].backward()
        while not any(name.startswith("pt_autograd") for name in other_threads()):
            pass
        manager.refresh()
        assert manager.step().loss == 4, manager.step().error
"""
)


COMPILED = (
    LINE
    + """
@torch.compile(backend="aot_eager")
def doubled(x):
    return 2 * x

if __name__ == "__main__":
    line = Line()
    with accelmgr.Manager(line, [torch.ones(4)] * 100, nprocs=2) as manager:
        assert manager.step().loss == 4
        doubled(line.weight).sum().backward()
        line.register_forward_hook(lambda module, arguments, outputs: {"loss": doubled(outputs["loss"])})
        assert manager.step().loss == 8
"""
)


@pytest.mark.skipif(any(map(os.path.exists, start_method.DRIVERS)), reason="autograd has threads for these devices")
def test_a_host_that_compiles_a_function_is_still_forked(tmp_path):
    """Where there is no GPU, autograd has threads for eight once torch.compile has looked at a backward()."""
    code, _, err = run_script(COMPILED, cwd=tmp_path)
    assert code == 0 and "start_method is 'spawn'" not in err, err


@pytest.mark.skipif(
    not hasattr(torch.utils.backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this torch has no devices that are made in Python",
)
def test_autograd_has_threads_for_devices_that_runners_do_not_use(tmp_path):
    """As on a machine with GPUs: backward() starts a thread for each device, and a fork of such a process has none."""
    code, _, err = run_script(SCRIPT, cwd=tmp_path)
    assert code == 0 and "because backward() was called in this process" in err, err
