"""What XLA runners compute, against plain PyTorch on the CPU. An XLA device is here torch_xla's CPU."""

from __future__ import annotations

from typing import Any

import device_suite
import pytest
import torch
from device_runners import IMAGES, Encoder, Normalized, Switched, Vectors, assert_close, start, vectors
from oracle import Oracle

import accelmgr


class TestNumbers(device_suite.Numbers):
    start = staticmethod(start)
    knows_strides = False

    def check(self, results, micro_batches):
        last = results[-1].scalars
        assert last["compiled"] == 1, "one program for all micro-batches of all steps"
        before_last = 4 * micro_batches + (micro_batches - 1) / 2  # Averaged over the micro-batches of the last step.
        assert last["programs"] == pytest.approx(before_last), "one execution for each micro-batch"
        read_to_open = 1
        assert last["tensors_read"] == read_to_open, "nothing is read before a step's end, and then not by a copy"


def test_buffers_are_the_cpu_s_but_for_the_variance_of_batch_norm_which_is_the_biased_one():
    torch.manual_seed(3)
    model = Normalized()
    shape = {"nprocs": 1, "batch_size_per_device": 5, "grad_accumulation_steps": 2}
    oracle = Oracle(model, iter(IMAGES), **shape)
    with start(model, IMAGES, **shape) as manager:
        for _ in range(3):
            result = manager.step(accumulate=False)
            oracle.zero_grad()
            assert result.loss == pytest.approx(oracle.step(), rel=1e-5)
            assert_close(manager, oracle)
        assert result.scalars["compiled"] == 1, "also where buffers come back as what the next step begins with"
        ours, theirs = manager.buffers(), dict(oracle.model.named_buffers())
        torch.testing.assert_close(ours["layers.1.running_mean"], theirs["layers.1.running_mean"])
        assert ours["steps"] == theirs["steps"] == 6 and ours["layers.1.num_batches_tracked"] == 6
        assert torch.equal(ours["table"], model.table)
        # running_var = 0.9 ** 6 + (1 - 0.9) * (sum of variances, each with its weight): only these have the factor.
        count, begin = 5 * 2 * 2, 0.9**6
        expected = (theirs["layers.1.running_var"] - begin) * (count - 1) / count + begin
        torch.testing.assert_close(ours["layers.1.running_var"], expected)
        model.layers[1].running_mean.fill_(0.5)
        oracle.model.layers[1].running_mean.fill_(0.5)
        assert manager.step().ok
        oracle.step()
        torch.testing.assert_close(manager.buffers()["layers.1.running_mean"], oracle.model.layers[1].running_mean)


def test_without_a_tpu_and_a_number_there_are_two_runners():
    with accelmgr.Manager(Switched(), Vectors(), device="xla", runners__threads=1) as manager:
        assert '"nprocs": 2' in manager.config
        assert manager.step().ok
        assert len(manager.statistics().runners) == 2


class Empties(Switched):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
        return {"loss": super().forward(x, y), "filled": torch.empty(1000).isnan().all()}


def test_a_model_finds_memory_filled_if_the_host_has_asked_for_that_though_transfers_do_without():
    with start(Empties(), Vectors(), nprocs=1) as manager:
        assert manager.step().scalars["filled"] == 0
    torch.use_deterministic_algorithms(True)
    try:
        with start(Empties(), Vectors(), nprocs=1) as manager:
            for _ in range(2):
                assert manager.step().scalars["filled"] == 1
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_model_that_grows_goes_on_after_rebind():
    torch.manual_seed(1)
    model, data = Encoder(), vectors(4)
    shape = {"nprocs": 2, "batch_size_per_device": 3}
    oracle = Oracle(model, data, **shape)
    with start(model, Vectors(), **shape) as manager:
        assert manager.step().loss == pytest.approx(oracle.step(), rel=1e-5)
        model.last = torch.nn.Sequential(model.last, torch.nn.Linear(2, 2))
        oracle = Oracle(model, data, **shape)
        for mine, theirs in zip(model.parameters(), oracle.model.parameters(), strict=True):
            theirs.grad = None if mine.grad is None else mine.grad.clone()
        manager.rebind()
        for _ in range(2):
            assert manager.step().loss == pytest.approx(oracle.step(), rel=1e-5)
            assert_close(manager, oracle)
        assert manager.statistics().steps == 3
