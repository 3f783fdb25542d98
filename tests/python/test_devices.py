"""Devices that runners cannot have are refused at the start, with what is missing; XLA itself is in test_xla_*.py."""

from __future__ import annotations

import importlib.util
import pathlib
import re
import sys

import pytest
import torch
from gate import Count, Told
from programs import run_script

import accelmgr
from accelmgr._runner import xla
from accelmgr.compat.tpu_manager import TPUManager

PYTHON = r"\S*" + re.escape(pathlib.Path(sys.executable).name)


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("tpu", r"Manager\(device='tpu'\).*'tpu' is refused: a TPU is an XLA device: xla"),
        ("gpu", r"Manager\(device='gpu'\).*'gpu' is refused: a GPU is a device of CUDA: cuda"),
        (torch.device("meta"), r"Manager\(device='meta'\).*it must be auto or cpu or cuda or xla or accelerator"),
    ],
    ids=str,
)
def test_a_device_that_no_runner_drives_is_refused_by_name(tmp_path, device, message):
    with pytest.raises(accelmgr.ConfigError, match=message) as caught:
        accelmgr.Manager(Told(tmp_path), Count(), nprocs=1, device=device)
    assert caught.value.key == "runners.device"


@pytest.mark.parametrize(
    ("device", "message", "key"),
    [
        ("cuda", "runners.device is cuda, but no GPU can be used: .", "runners.device"),
        ("cuda:1", r"runners.devices is \[1\], but no GPU can be used: .", "runners.devices"),
        (torch.device("cuda", 0), r"runners.devices is \[0\], but no GPU can be used: .", "runners.devices"),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", [accelmgr.Manager, TPUManager])
def test_gpus_that_cannot_be_used_are_refused_with_the_reason(tmp_path, monkeypatch, kind, device, message, key):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(accelmgr.ConfigError, match=message) as caught:
        kind(Told(tmp_path), Count(), nprocs=1, device=device, start=True)
    assert caught.value.key == key


def test_one_gpu_by_its_number_is_a_list_of_one_device(tmp_path):
    manager = accelmgr.Manager(Told(tmp_path), Count(), device="cuda:1", start=False)
    assert '"runners.device": cuda' in manager.config
    assert '"runners.devices": ["1"]' in manager.config
    assert '"nprocs": -1' in manager.config


def test_auto_is_the_cpu_where_no_gpu_can_be_used_and_the_configuration_says_so(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with accelmgr.Manager(Told(tmp_path), Count(), runners__threads=1, device="auto") as manager:
        assert manager.step().ok
        assert '"runners.device": cpu' in manager.config
        assert '"nprocs": 2' in manager.config
    assert "the runners compute on the CPU, because no GPU can be used: " in capfd.readouterr().err


PROGRAM = """\
import accelmgr, torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))
    def forward(self, x):
        return (self.weight * x).sum()

try:
    accelmgr.Manager(Net(), [torch.ones(2)] * 4, nprocs=1, runners__threads=1, device="xla")
except accelmgr.ConfigError as error:
    print(error.key, error)
"""


def refusal(folder: pathlib.Path) -> str:
    code, out, err = run_script(PROGRAM, cwd=folder)
    assert code == 0, err
    return out


def install(folder: pathlib.Path, version: str, content: str) -> None:
    """Something like torch_xla, beside the program."""
    (folder / "torch_xla").mkdir()
    (folder / "torch_xla" / "__init__.py").write_text(content)
    about = folder / f"torch_xla-{version}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch_xla\nVersion: {version}\n")


@pytest.mark.skipif(importlib.util.find_spec("torch_xla") is not None, reason="torch_xla is installed")
def test_without_torch_xla_the_interpreter_and_the_command_that_installs_it_are_named(tmp_path):
    out = refusal(tmp_path)
    assert re.match(rf"runners.device .*{PYTHON} has no torch_xla; .*{PYTHON} -m pip install torch=\S+ torch_xla=", out)


def test_a_torch_xla_of_another_torch_is_named_with_both_versions(tmp_path):
    install(tmp_path, "1.13.0", "raise SystemError('it was imported')")
    out = refusal(tmp_path)
    torch_version = re.escape(torch.__version__)
    assert re.search(rf"{PYTHON} has torch_xla 1.13.0 and torch {torch_version}; .*{PYTHON} -m pip install", out)


def test_a_torch_xla_that_cannot_be_imported_is_named_with_the_reason(tmp_path):
    install(tmp_path, torch.__version__.partition("+")[0], "raise ImportError('undefined symbol: _ZN2at')")
    out = refusal(tmp_path)
    assert re.search(rf"{PYTHON} cannot import torch_xla .*ImportError: undefined symbol: _ZN2at", out), out


def test_the_runner_of_a_tpu_sees_the_chip_of_its_rank_and_no_other_process():
    variables = xla.variables_of("TPU", 3, 2, {"TPU_VISIBLE_CHIPS": "0,1,2,3", "PJRT_NPROC": "9"})
    removed = {name for name, value in variables.items() if value is None}
    assert {name: value for name, value in variables.items() if value is not None} == {
        "PJRT_DEVICE": "TPU",
        "TPU_VISIBLE_CHIPS": "3",
        "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1",
        "TPU_PROCESS_BOUNDS": "1,1,1",
    }
    assert removed == {"TPU_PROCESS_ADDRESSES", "TPU_PROCESS_PORT", "CLOUD_TPU_TASK_ID"}


def test_the_runner_of_a_cpu_computes_with_its_threads_unless_the_user_says_how_many():
    assert xla.variables_of("CPU", 1, 2, {})["PJRT_NPROC"] == "2"
    assert xla.variables_of("CPU", 1, 2, {"PJRT_NPROC": "5"})["PJRT_NPROC"] == "5"


def test_a_built_in_model_computes_on_the_cpu_alone():
    with pytest.raises(accelmgr.ConfigError, match="runners.device is xla.*'mlp'.*is for models of Python") as caught:
        accelmgr.Manager("mlp", "synthetic", nprocs=1, device="xla")
    assert caught.value.key == "runners.device"
