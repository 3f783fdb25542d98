"""What runners do on every kind of device: one suite, of which the tests of each device are subclasses."""

from __future__ import annotations

import os
import pathlib
import signal
from collections.abc import Callable
from typing import ClassVar

import pytest
import torch
from device_runners import (
    BF16_TOLERANCE,
    SHAPE,
    TOLERANCE,
    Dropping,
    Encoder,
    Permuted,
    Switched,
    Ties,
    Vectors,
    Writes,
    assert_close,
    bits_of,
    check_frozen_parameters,
    distance,
    follow,
    made,
    same,
    train,
    trained,
    vectors,
    wait_until_settled,
)
from oracle import Oracle
from saving import save
from torch import nn

import accelmgr


class Numbers:
    """What is computed is what plain PyTorch computes on the CPU."""

    start: Callable[..., accelmgr.Manager]
    model: Callable[[], nn.Module] = Encoder
    recurrent: type[nn.RNNBase] = nn.LSTM
    knows_strides = True

    def check(self, results: list[accelmgr.StepResult], micro_batches: int) -> None:
        """Checks what this kind of device shows beside the numbers."""

    @pytest.mark.parametrize(
        "shape",
        [
            {"nprocs": 2, "batch_size_per_device": 3, "grad_accumulation_steps": 1},
            {"nprocs": 3, "batch_size_per_device": 2, "grad_accumulation_steps": 3},
        ],
        ids=["two", "three_of_three_micro_batches"],
    )
    def test_runners_train_as_one_process_on_the_cpu_does(self, shape):
        torch.manual_seed(1)
        model = self.model()
        results = train(self.start, model, Vectors(), vectors(4), steps=5, **shape)
        assert all(result.scalars["twice"] == pytest.approx(2 * result.loss, rel=1e-6) for result in results)
        assert {result.samples for result in results} == {6 * shape["grad_accumulation_steps"]}
        assert {str(parameter.device) for parameter in model.parameters()} == {"cpu"}
        self.check(results, shape["grad_accumulation_steps"])

    def test_ties_views_weak_references_and_hooks_are_the_model_s(self):
        torch.manual_seed(2)
        model = Ties(self.recurrent)
        oracle = Oracle(model, vectors(4), nprocs=2, batch_size_per_device=2)
        oracle.model = Ties(self.recurrent)  # A copy would have the closure of the original.
        oracle.model.load_state_dict(model.state_dict())
        with self.start(model, Vectors(), batch_size_per_device=2) as manager:
            assert "head.weight" not in dict(manager.named_parameters())
            for _ in range(3):
                oracle.zero_grad()
                assert manager.step(accumulate=False).loss == pytest.approx(oracle.step(), rel=1e-5)
                assert_close(manager, oracle)
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.mul_(0.9)
                follow(model, oracle)

    def test_modes_and_frozen_parameters_are_those_of_the_host_s_model(self):
        torch.manual_seed(9)
        model = Switched()
        oracle = Oracle(model, vectors(4), nprocs=2)
        with self.start(model, Vectors()) as manager:
            assert manager.step(accumulate=False).loss != pytest.approx(oracle.step(), rel=1e-3), "something is dropped"
            for frozen in (True, False):
                for each in (model, oracle.model):
                    each.eval()
                    each.layers[0].requires_grad_(not frozen)
                oracle.zero_grad()
                assert manager.step(accumulate=False).loss == pytest.approx(oracle.step(), rel=1e-5)
                assert_close(manager, oracle)
                assert manager.get_aggregated_gradients()[0].any() != frozen
                assert (model.layers[0].weight.grad is None) == frozen

    def test_frozen_parameters_that_are_written_and_unfrozen(self):
        check_frozen_parameters(self.start)

    def test_gradients_of_parameters_that_are_not_row_major(self):
        torch.manual_seed(4)
        model = Permuted()
        strides = [parameter.stride() for parameter in model.parameters()]
        oracle = Oracle(model, vectors(4), nprocs=2, **SHAPE)
        with self.start(model, Vectors(), **SHAPE) as manager:
            for _ in range(3):
                oracle.zero_grad()
                result = manager.step(accumulate=False)
                assert result.loss == pytest.approx(oracle.step(), rel=1e-5)
                assert_close(manager, oracle)
                assert not self.knows_strides or list(result.scalars.values()) == [4, 1, 4, 2, 1, 3]
                assert [parameter.stride() for parameter in model.parameters()] == strides
                with torch.no_grad():
                    for parameter in model.parameters():
                        if parameter.requires_grad:
                            assert parameter.grad.stride() == parameter.stride()
                            parameter.mul_(0.9)
                follow(model, oracle)

    def test_in_bfloat16_gradients_are_as_near_as_its_eight_bits_allow(self):
        torch.manual_seed(6)
        model = self.model()
        oracle = Oracle(model, vectors(4), nprocs=2, batch_size_per_device=4)
        with self.start(model, Vectors(), batch_size_per_device=4, runners__autocast="bf16") as manager:
            assert manager.step().loss == pytest.approx(oracle.step(), rel=BF16_TOLERANCE)
            assert_close(manager, oracle, BF16_TOLERANCE)
            assert distance(manager.get_aggregated_gradients(), oracle.gradients()) > TOLERANCE


class Faults:
    """Steps are replayed bit for bit, and a failing device is told from a failing model."""

    start: Callable[..., accelmgr.Manager]
    failing: Callable[[pathlib.Path], Dropping] = Dropping
    disturbances: ClassVar[list[dict[int, str]]] = [{1: "die", 3: "die"}]
    resumptions: ClassVar[list[tuple[dict[str, str], dict[str, str]]]] = [({}, {"device": "cpu"})]
    """Pairs of devices, of which the second one goes on with a run of the first one."""
    draws_on_the_cpu = False
    """Whether that draws the same random numbers in all micro-batches."""
    shape_of_failing: ClassVar[dict[str, int]] = SHAPE
    lost: ClassVar[dict[str, tuple[str, ...]]]
    """Faults of the device, and what the log says of them, in full unless the one before said the same."""
    wrong: ClassVar[dict[str, str]] = {}
    """Faults of the model, and what the error says of them."""
    misuses: ClassVar[dict[type[nn.Module], str]] = {Writes: "the model wrote to its parameter 'layers.3.bias'"}

    def test_a_step_that_is_disturbed_is_replayed_bit_for_bit(self, tmp_path):
        undisturbed, _ = trained(self.start, made(self.failing, tmp_path), {})
        numbers = [each for each in undisturbed if isinstance(each, tuple)]
        for column in zip(*numbers, strict=True):
            assert len(set(column)) == 5, "other random numbers in each step"
        for faults in self.disturbances:
            disturbed, results = trained(self.start, made(self.failing, tmp_path), faults)
            assert [result.tries for result in results] == [1 + (step in faults) for step in range(5)]
            assert same(undisturbed, disturbed), faults

    def test_a_resumed_run_goes_on_bit_for_bit_and_another_device_may_resume_it(self, tmp_path):
        for first, second in self.resumptions:
            folder = str(tmp_path / str(first.get("device")))
            options = {"checkpoint__directory": folder, **SHAPE}
            with self.start(made(self.failing, tmp_path), Vectors(), **first, **options) as manager:
                bits_of(manager)
                save(manager)
                expected, _ = bits_of(manager)
            options["checkpoint__resume"] = "latest"
            with self.start(made(self.failing, tmp_path), Vectors(), **first, **options) as manager:
                assert same(bits_of(manager)[0], expected)
            with self.start(made(self.failing, tmp_path), Vectors(), **second, **options) as manager:
                drawn = bits_of(manager)[0][0][1]
                assert not self.draws_on_the_cpu or drawn == expected[0][1]

    def test_a_stopped_runner_is_replaced_and_the_step_repeated(self, tmp_path, capfd):
        with self.start(made(self.failing, tmp_path), Vectors(), runners__hang_timeout=1, **SHAPE) as manager:
            assert manager.step().ok
            wait_until_settled(manager)
            stopped = manager.statistics().runners[1].pid
            os.kill(stopped, signal.SIGSTOP)
            result = manager.step()
            assert result.ok and result.tries == 2
            assert manager.statistics().runners[1].pid != stopped
        assert "runner 1 is stopped" in capfd.readouterr().err

    def test_a_device_that_fails_ends_its_runner_which_is_replaced(self, tmp_path, capfd):
        model = made(self.failing, tmp_path)
        options = {"runners__restarts_per_window": 0, **self.shape_of_failing}  # There may be any number.
        with self.start(model, Vectors(), nprocs=1, **options) as manager:
            for fault, said in self.lost.items():
                assert manager.step().tries == 1
                wait_until_settled(manager)
                pid = manager.statistics().runners[0].pid
                model.tell(fault)
                result = manager.step()
                assert result.ok and result.tries == 2, fault
                assert manager.statistics().runners[0].pid != pid
                err = capfd.readouterr().err
                for part in (f"runner 0 (pid {pid})", *said):
                    assert part in err, (fault, err)

    def test_an_error_of_the_model_is_not_tried_again_and_arrives_with_its_traceback(self, tmp_path):
        for fault, said in {"raise": "ArithmeticError: told to raise", **self.wrong}.items():
            model = made(self.failing, tmp_path)
            with self.start(model, Vectors(), nprocs=1, **self.shape_of_failing) as manager:
                assert manager.step().ok
                model.tell(fault)
                result = manager.step()
                assert (result.status, result.error_type) == ("runner_lost", "ModelError")
                assert said in result.error, result.error
                assert fault != "raise" or "in forward" in result.error, result.error

    def test_a_model_that_does_what_it_must_not_is_told(self):
        for model, said in self.misuses.items():
            with self.start(model(), Vectors(), nprocs=1) as manager:
                result = manager.step()
                assert (result.status, result.error_type) == ("runner_lost", "ModelError")
                assert said in result.error
