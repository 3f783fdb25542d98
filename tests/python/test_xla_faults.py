"""XLA runners under faults: what is killed, stopped, hangs or raises; and steps that are replayed bit for bit."""

from __future__ import annotations

from typing import Any, ClassVar

import device_suite
import pytest
import torch
from device_runners import SHAPE, Dropping, Encoder, Vectors, made, same, start, trained

import accelmgr

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


class TestFaults(device_suite.Faults):
    start = staticmethod(start)
    failing = Failing
    lost: ClassVar = {
        what: (f"the XLA device has failed: {FAILURES[what]}",) for what in ("forward", "upload", "sync", "read")
    }
    wrong: ClassVar = {"compile": FAILURES["compile"]}


def test_runners_that_leave_a_step_compile_on(tmp_path):
    undisturbed, results = trained(start, made(Dropping, tmp_path), {})
    given_up, results_then = trained(start, made(Dropping, tmp_path), {}, timeouts=2)
    assert same(undisturbed, given_up)
    assert results[-1].scalars["compiled"] == results_then[-1].scalars["compiled"] == 1


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


def test_a_device_that_cannot_be_opened_is_named(monkeypatch):
    monkeypatch.setenv("PJRT_DEVICE", "TPU")
    with pytest.raises(accelmgr.RunnerError, match=r"runner 0 cannot open its device \(PJRT_DEVICE=TPU\)"):
        start(Encoder(), Vectors(), nprocs=1, start_method="spawn")
