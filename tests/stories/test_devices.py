"""Checks what a person is told of devices: by `info`, by a run that chooses them, and where they are missing.

The GPUs are those of a fake of NVIDIA's driver, which lists them and does nothing else.
"""

import os

import pytest
from conftest import DONE, USAGE

MACHINE = os.getpid()  # Managers claim GPUs; those of other tests are others.
FAKE = {"LD_LIBRARY_PATH": os.environ["FAKE_DRIVER_FOLDER"], "FAKE_DRIVER_MACHINE": str(MACHINE)}
NO_GPU = FAKE | {"FAKE_DRIVER_GPUS": "0"}
GPU_A = f"GPU 0 (Fake GPU A, 16.0 GiB, compute capability 9.0, GPU-a0a1a2a3-a4a5-a6a7-a8a9-aaab{MACHINE:08x})"

CONFIG = """\
batch_size_per_device: 4
runners: {threads: 1}
model: {kind: mlp, mlp: {input_size: 16, hidden_size: 32}}
train: {steps: 5}
"""

TINY = """\
import torch


def make():
    return torch.nn.Linear(2, 1)


def points():
    return [(torch.ones(2),)]
"""


def train(person, *settings, env=None):
    person.file("run.yaml").write_text(CONFIG)
    words = " ".join(f"--set {setting}" for setting in settings)
    return person.types(f"accelmgr train -c run.yaml {words}", env=env)


def test_info_lists_the_gpus(person):
    ended = person.types("accelmgr info", env=FAKE)
    assert ended.code == DONE
    assert GPU_A in ended.out and "GPU 1 (Fake GPU B, 32.0 GiB" in ended.out


def test_info_lists_the_slices_of_a_gpu(person):
    ended = person.types("accelmgr info", env=FAKE | {"FAKE_DRIVER_SLICES": "2"})
    assert ended.code == DONE
    for number in (0, 1):
        uuid = f"MIG-a0a1a2a3-0{number}a5-a6a7-a8a9-aaab{MACHINE:08x}"
        described = f"GPU {number} (Fake GPU A MIG 1g.5gb, 5.0 GiB, compute capability 9.0, {uuid})"
        assert described in ended.out, ended.text
    assert "GPU 2 (Fake GPU B, 32.0 GiB" in ended.out


@pytest.mark.parametrize(
    ("env", "said"),
    [
        (NO_GPU, "no GPU can be used: cuInit: CUDA_ERROR_NO_DEVICE (100): no CUDA-capable device is detected"),
        (FAKE | {"FAKE_DRIVER_CRASHES": "1"}, "killed by signal 11 (SEGV)"),
    ],
    ids=["no GPU", "crash"],
)
def test_info_says_why_no_gpu_can_be_used(person, env, said):
    ended = person.types("accelmgr info", env=env)
    assert ended.code == DONE
    assert said in ended.out


def test_auto_computes_on_the_cpu_where_there_is_no_gpu_and_says_so(person):
    ended = train(person, "runners.device=auto", env=NO_GPU | {"ACCELMGR_LOG_LEVEL": "info"})
    assert ended.code == DONE, ended.text
    assert "2 runners on the CPU, " in ended.out
    assert "rank 0 computes on the CPU" in ended.err and "rank 1 computes on the CPU" in ended.err
    assert "the runners compute on the CPU, because no GPU can be used: cuInit: CUDA_ERROR_NO_DEVICE" in ended.err


REFUSED = {
    "no such GPU": (FAKE, ["runners.device=cuda", "runners.devices=0,7"], ["runners.devices names '7'", GPU_A]),
    "a list for the CPU": (FAKE, ["runners.devices=0,1"], ["runners.device is cpu; set auto or cuda"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_devices_that_cannot_be_had_are_refused(person, case):
    env, settings, said = REFUSED[case]
    ended = train(person, *settings, env=env)
    assert ended.code == USAGE, ended.text
    for part in said:
        assert part in ended.err, ended.text


def test_a_runner_of_python_sees_its_gpu_in_the_environment_of_python_too(person):
    """Torch asks the real driver, and fails. What it fails for is read from os.environ."""
    person.file("tiny.py").write_text(TINY)
    ended = train(
        person,
        "runners.device=cuda",
        "runners.devices=1",
        "model.kind=python",
        "model.factory=tiny:make",
        "data.kind=python",
        "data.factory=tiny:points",
        env=FAKE,
    )
    assert f"can use (CUDA_VISIBLE_DEVICES=GPU-b0b1b2b3-b4b5-b6b7-b8b9-babb{MACHINE:08x}" in ended.err, ended.text
