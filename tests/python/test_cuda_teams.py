"""CUDA runners that sum up their gradients over NCCL, against plain PyTorch on the CPU. The devices and NCCL are the
fakes of cuda_runners.py."""

from __future__ import annotations

import os
import pathlib
import signal
from typing import Any

import pytest
import torch
from cuda_runners import LIBRARY, FakeCuda, start, train
from device_runners import Encoder, Vectors, check_frozen_parameters, vectors

NCCL = str(LIBRARY)


class Summing(Encoder):
    """Tells how many sums over its team a runner has queued before this forward pass. Dies when a file says so."""

    def __init__(self, folder: pathlib.Path | None = None) -> None:
        super().__init__()
        self._folder = folder

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
        runtime = FakeCuda.current.runtime if hasattr(FakeCuda, "current") else None
        if runtime is not None and self._folder is not None and runtime.fake_nccl_sums() > 0:
            try:
                (self._folder / "killed").touch(exist_ok=False)
                os.kill(os.getpid(), signal.SIGKILL)
            except FileExistsError:
                pass
        return super().forward(x, y) | {"sums": 0.0 if runtime is None else float(runtime.fake_nccl_sums())}


@pytest.mark.parametrize("runners", [2, 3])
def test_runners_in_a_team_train_as_one_process_on_the_cpu_does(runners):
    torch.manual_seed(1)
    shape = {"nprocs": runners, "batch_size_per_device": 2, "grad_accumulation_steps": 2}
    results = train(Summing(), Vectors(), vectors(4), steps=4, nccl=NCCL, **shape)
    assert [result.scalars["sums"] > 0 for result in results] == [False, True, True, True]
    assert [result.tries for result in results] == [1, 1, 1, 1]


def test_without_the_option_they_are_in_no_team():
    results = train(Summing(), Vectors(), vectors(4), steps=2, nccl=NCCL, runners__nccl="off")
    assert [result.scalars["sums"] for result in results] == [0, 0]


def test_a_team_in_which_a_runner_is_killed_is_followed_by_another(tmp_path):
    results = train(Summing(tmp_path), Vectors(), vectors(4), steps=4, nccl=NCCL, replacements=1)
    assert [result.tries for result in results] == [1, 2, 1, 1]
    assert results[3].scalars["sums"] > 0


def test_frozen_parameters_that_are_written_and_unfrozen():
    check_frozen_parameters(start, nccl=NCCL)
    check_frozen_parameters(start, runners__nccl="off")
