"""XLA runners under faults: what is killed, stopped, hangs or raises; and steps that are replayed bit for bit."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch
from device_runners import SHAPE, Dropping, Encoder, Vectors, Writes, check_resume, same, start, wait_until_settled

import accelmgr

pytestmark = pytest.mark.usefixtures("forkserver")


FAILURES = {
    "forward": "DATA_LOSS: the chip is gone",
    "upload": "UNAVAILABLE: the chip is gone",
    "sync": "Bad StatusOr access: INTERNAL: the chip is gone",
    "read": "Check failed: status: ABORTED: the chip is gone",
    "compile": "UNIMPLEMENTED: no chip can do this",
}


def fail(what: str) -> None:
    """Makes torch_xla fail in this process as it does when a chip is lost, or when it has no code for an operation."""
    import torch_xla
    from torch_xla.core import xla_model

    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError(FAILURES[what])

    if what == "forward":
        fails()  # As item() does.
    elif what == "upload":
        xla_model.send_cpu_data_to_device = fails
    elif what == "read":
        torch._to_cpu = torch_xla._XLAC._to_dlpack = fails
    else:
        torch_xla.sync = fails


class Failing(Dropping):
    def obey(self) -> None:
        super().obey()
        for what in FAILURES:
            if self.told(what):
                fail(what)


def trained(
    folder: Any, disturb: dict[int, str], give_up_while_compiling: bool = False
) -> tuple[list[Any], list[accelmgr.StepResult]]:
    """Everything that five steps give, bit for bit; and their results."""
    torch.manual_seed(4)
    model = Dropping(folder)
    bits: list[Any] = []
    results = []
    with start(model, Vectors(), **SHAPE) as manager:
        pids = [runner.pid for runner in manager.statistics().runners]
        if give_up_while_compiling:
            for _ in range(2):
                assert manager.step(timeout=0.1, accumulate=False).status == "timeout"
        for step in range(5):
            if step in disturb:
                model.tell(disturb[step])
            result = manager.step(accumulate=False)
            result.raise_for_status()
            results.append(result)
            bits.append((result.loss, result.scalars["noise"]))
            bits += [gradient.clone() for gradient in manager.get_aggregated_gradients()]
            bits += [buffer for _, buffer in sorted(manager.buffers().items())]
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.01 * parameter.grad
        assert disturb or pids == [runner.pid for runner in manager.statistics().runners]
    return bits, results


def test_a_step_that_is_disturbed_is_replayed_bit_for_bit(tmp_path):
    undisturbed, results = trained(tmp_path, {})
    noises = [each for each in undisturbed if isinstance(each, tuple)]
    assert len(set(noises)) == 5, "other numbers in each step"
    assert results[-1].scalars["compiled"] == 1
    disturbed, results = trained(tmp_path, {1: "die", 3: "die"})
    assert [result.tries for result in results] == [1, 2, 1, 2, 1]
    assert same(undisturbed, disturbed), "runners were killed in the step"
    given_up, results = trained(tmp_path, {}, give_up_while_compiling=True)
    assert same(undisturbed, given_up), "runners have left a step, and compiled on"
    assert results[-1].scalars["compiled"] == 1


def test_a_resumed_run_goes_on_bit_for_bit_and_another_device_may_resume_it(tmp_path):
    check_resume(start, tmp_path)


def test_a_stopped_runner_is_replaced_and_the_step_repeated(tmp_path, capfd):
    torch.manual_seed(4)
    with start(Dropping(tmp_path), Vectors(), runners__hang_timeout=1, **SHAPE) as manager:
        assert manager.step().ok
        wait_until_settled(manager)
        stopped = manager.statistics().runners[1].pid
        os.kill(stopped, signal.SIGSTOP)
        result = manager.step()
        assert result.ok and result.tries == 2
        assert manager.statistics().runners[1].pid != stopped
    assert "runner 1 is stopped" in capfd.readouterr().err


def test_compiling_for_longer_than_the_hang_timeout_is_no_hang(capfd):
    torch.manual_seed(5)
    with start(Encoder(), Vectors(), runners__hang_timeout=0.3) as manager:
        result = manager.step()
        assert result.ok and result.tries == 1
        assert result.step_ms > 600, "nothing is shown if it compiles at once"
        assert manager.statistics().replacements == 0
    assert "is slow" not in capfd.readouterr().err, "the watchdog has heard of it all the time"


def test_a_device_that_hangs_is_a_timeout_and_then_a_lost_runner(tmp_path, capfd):
    model = Dropping(tmp_path)
    with start(model, Vectors(), nprocs=1, step_timeout=2, runners__hang_timeout=0.5, **SHAPE) as manager:
        assert manager.step(timeout=60).ok
        pid = manager.statistics().runners[0].pid
        model.tell("hang")
        assert manager.step().status == "timeout"
        assert manager.statistics().runners[0].pid == pid, "it has left the step, and so it stays"
        result = manager.step(timeout=60)
        assert result.ok and manager.statistics().runners[0].pid != pid
    assert "runner 0 hangs" in capfd.readouterr().err


def test_an_exception_of_the_model_arrives_with_its_traceback(tmp_path):
    model = Dropping(tmp_path)
    with start(model, Vectors(), nprocs=1, **SHAPE) as manager:
        assert manager.step().ok
        model.tell("raise")
        result = manager.step()
        assert (result.status, result.error_type) == ("runner_lost", "ModelError")
        assert "ArithmeticError: told to raise" in result.error and "in forward" in result.error


def test_a_lost_device_ends_its_runner_which_is_replaced(tmp_path, capfd):
    model = Failing(tmp_path)
    with start(model, Vectors(), nprocs=1, **SHAPE) as manager:
        for what in ("forward", "upload", "sync", "read"):
            assert manager.step().ok
            wait_until_settled(manager)
            pid = manager.statistics().runners[0].pid
            model.tell(what)
            result = manager.step()
            assert result.ok and result.tries == 2, what
            assert manager.statistics().runners[0].pid != pid
            err = capfd.readouterr().err
            assert f"runner 0 (pid {pid})" in err and f"the XLA device has failed: {FAILURES[what]}" in err


def test_a_program_that_a_device_cannot_compute_is_the_model_s_error(tmp_path):
    model = Failing(tmp_path)
    with start(model, Vectors(), nprocs=1, **SHAPE) as manager:
        assert manager.step().ok
        model.tell("compile")
        result = manager.step()
        assert (result.status, result.error_type) == ("runner_lost", "ModelError")
        assert FAILURES["compile"] in result.error


def test_a_model_that_writes_to_a_parameter_is_told_which():
    with start(Writes(), Vectors(), nprocs=1) as manager:
        result = manager.step()
        assert (result.status, result.error_type) == ("runner_lost", "ModelError")
        assert "the model wrote to its parameter 'layers.3.bias'" in result.error


def test_a_device_that_cannot_be_opened_is_named(monkeypatch):
    monkeypatch.setenv("PJRT_DEVICE", "TPU")
    with pytest.raises(accelmgr.RunnerError, match=r"runner 0 cannot open its device \(PJRT_DEVICE=TPU\)"):
        start(Encoder(), Vectors(), nprocs=1, start_method="spawn")
