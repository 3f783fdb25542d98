"""XLA runners of programs that were there before: scripts for TPUManager, hosts that fork."""

from __future__ import annotations

import pytest
import torch
from device_runners import Encoder, Vectors, assert_close, vectors
from oracle import Oracle
from programs import run_script

from accelmgr.compat.tpu_manager import TPUManager


def test_a_script_for_tpu_manager_has_its_devices(tmp_path):
    torch.manual_seed(7)
    model = Encoder()
    shape = {"nprocs": 2, "batch_size_per_device": 2, "grad_accumulation_steps": 2}
    oracle = Oracle(model, vectors(4), **shape)
    manager = TPUManager(model, Vectors(), **shape, prefetch=4, start=True, device="xla")
    try:
        for _ in range(2):
            loss, samples = manager.step()
            assert loss == pytest.approx(oracle.step(), rel=1e-5) and samples == 8
            assert_close(manager, oracle)
            values = [parameter.detach() * 0.9 for parameter in oracle.model.parameters()]
            manager.update_model_parameters(values)
            manager.zero_grad()
            oracle.zero_grad()
            for parameter, value in zip(oracle.model.parameters(), values, strict=True):
                parameter.data.copy_(value)
    finally:
        manager.terminate()


FORKS = """\
import torch, torch_xla
from device_runners import Encoder, Vectors, start
torch.ones(2, device="xla").cpu()
import accelmgr
try:
    start(Encoder(), Vectors(), nprocs=1, start_method="fork")
except accelmgr.ConfigError as error:
    print(error)
"""


def test_a_runtime_that_ran_before_is_named_and_nothing_is_forked(tmp_path):
    code, out, err = run_script(FORKS, cwd=tmp_path)
    assert code == 0 and "torch_xla's runtime has run in this process" in out, out + err


FORK = """\
import torch
from oracle import Oracle
from device_runners import Encoder, Vectors, assert_close, start, vectors
model = Encoder()
oracle = Oracle(model, vectors(4), nprocs=2)
with start(model, Vectors(), start_method="fork") as manager:
    loss = manager.step().loss
    print(abs(loss - oracle.step()) <= 1e-5 * loss)
    assert_close(manager, oracle)
try:
    start(Encoder(), Vectors(), nprocs=1, start_method="fork")
except Exception as error:
    print(error)
"""


def test_a_fork_of_the_host_has_device_runners_unless_the_host_has_called_backward(tmp_path):
    code, out, err = run_script(FORK, cwd=tmp_path)
    assert code == 0 and out.startswith("True\n"), out + err
    assert "backward() was called already in the process that runner 0 was forked from" in out, out + err
