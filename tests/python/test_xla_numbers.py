"""What XLA runners compute, against plain PyTorch on the CPU. An XLA device is here torch_xla's CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from device_runners import (
    BF16_TOLERANCE,
    TOLERANCE,
    Encoder,
    Images,
    Normalized,
    Switched,
    Vectors,
    assert_close,
    check_frozen_parameters,
    check_modes,
    check_strides,
    check_ties,
    distance,
    start,
    vectors,
)
from oracle import Oracle

import accelmgr

pytestmark = pytest.mark.usefixtures("forkserver")


@pytest.mark.parametrize(
    "shape",
    [
        {"nprocs": 2, "batch_size_per_device": 3, "grad_accumulation_steps": 1},
        {"nprocs": 3, "batch_size_per_device": 2, "grad_accumulation_steps": 3},
    ],
    ids=["two", "three_of_three_micro_batches"],
)
def test_runners_train_as_one_process_on_the_cpu_does_with_one_program(shape):
    torch.manual_seed(1)
    model = Encoder()
    oracle = Oracle(model, vectors(4), **shape)
    with start(model, Vectors(), **shape) as manager:
        addresses = [parameter.data_ptr() for parameter in model.parameters()]
        ours, theirs = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in (model, oracle.model)]
        results = []
        for step in range(4):
            result = manager.step(accumulate=step % 2 == 1)
            results.append(result)
            if step % 2 == 0:
                oracle.zero_grad()
            assert result.loss == pytest.approx(oracle.step(), rel=1e-5)
            assert result.samples == shape["nprocs"] * shape["batch_size_per_device"] * shape["grad_accumulation_steps"]
            assert result.scalars["twice"] == pytest.approx(2 * result.loss, rel=1e-6)
            assert_close(manager, oracle)
            ours.step()
            theirs.step()
            for one, other in zip(model.parameters(), oracle.model.parameters(), strict=True):
                other.data.copy_(one)  # Adam makes small differences large where gradients are near to zero.
        micro_batches = shape["grad_accumulation_steps"]
        last = results[-1].scalars
        assert last["compiled"] == 1, "one program for all micro-batches of all steps"
        before_last = 3 * micro_batches + (micro_batches - 1) / 2  # Averaged over the micro-batches of the last step.
        assert last["programs"] == pytest.approx(before_last), "one execution for each micro-batch"
        read_to_open = 1
        assert last["tensors_read"] == read_to_open, "nothing is read before a step's end, and then not by a copy"
    assert [parameter.data_ptr() for parameter in model.parameters()] == addresses


def test_ties_views_weak_references_and_hooks_are_the_model_s():
    check_ties(start)


def test_buffers_are_the_cpu_s_but_for_the_variance_of_batch_norm_which_is_the_biased_one():
    torch.manual_seed(3)
    model = Normalized()
    shape = {"nprocs": 1, "batch_size_per_device": 5, "grad_accumulation_steps": 2}
    oracle = Oracle(model, (Images()[i] for i in range(1000)), **shape)
    with start(model, Images(), **shape) as manager:
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


def test_modes_and_frozen_parameters_are_those_of_the_host_s_model():
    check_modes(start)


def test_frozen_parameters_that_are_written_and_unfrozen():
    check_frozen_parameters(start)


def test_in_bfloat16_gradients_are_as_near_as_its_eight_bits_allow():
    torch.manual_seed(6)
    model = Encoder()
    oracle = Oracle(model, vectors(4), nprocs=2, batch_size_per_device=4)
    with start(model, Vectors(), batch_size_per_device=4, runners__autocast="bf16") as manager:
        assert manager.step().loss == pytest.approx(oracle.step(), rel=BF16_TOLERANCE)
        assert_close(manager, oracle, BF16_TOLERANCE)
        assert distance(manager.get_aggregated_gradients(), oracle.gradients()) > TOLERANCE


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


def test_gradients_of_parameters_that_are_not_row_major():
    check_strides(start, knows_strides=False)
