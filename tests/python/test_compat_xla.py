"""Checks that accelmgr.compat.xla_multiprocessing behaves as torch_xla's module does."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

import accelmgr
import accelmgr.compat.xla_multiprocessing as xmp
from accelmgr import distributed

WRAPPED = xmp.MpModelWrapper(torch.nn.Linear(2, 1))
SERIAL = xmp.MpSerialExecutor()


def _say(index: int, path: str, word: str) -> str:
    with open(f"{path}/{index}", "w") as file:
        file.write(f"{word} {os.environ['ACCELMGR_MP_DEVICE']} {os.environ['ACCELMGR_ORDINAL']} {os.getpid()}")
    return word


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_spawn_passes_the_index_and_returns_nothing(tmp_path: Any, method: str) -> None:
    assert xmp.spawn(_say, (str(tmp_path), "yes"), nprocs=2, start_method=method) is None
    said = [(tmp_path / str(index)).read_text().split() for index in range(2)]
    assert [words[:3] for words in said] == [["yes", "CPU:0", "0"], ["yes", "CPU:1", "1"]]
    assert len({words[3] for words in said} | {str(os.getpid())}) == 3


def test_without_configuration_none_is_one_and_runs_here(tmp_path: Any) -> None:
    assert xmp.spawn(_say, (str(tmp_path), "here")) is None
    assert (tmp_path / "0").read_text().split()[3] == str(os.getpid())
    assert [path.name for path in tmp_path.iterdir()] == ["0"]


def test_none_is_as_many_as_are_configured(tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("ACCELMGR_TPU_CONFIG", "tpu_worker;0;localhost:25822")
    monkeypatch.setenv("ACCELMGR_TPU_NUM_DEVICES", "3")
    assert xmp.spawn(_say, (str(tmp_path), "all"), start_method="fork") is None
    assert {path.name for path in tmp_path.iterdir()} == {"0", "1", "2"}
    assert (tmp_path / "2").read_text().split()[1] == "TPU:2"


def test_without_join_it_returns_the_context(tmp_path: Any) -> None:
    context = xmp.spawn(_say, (str(tmp_path), "later"), nprocs=2, join=False, start_method="fork")
    assert isinstance(context, xmp.SpawnContext)
    assert context.join(100) and context.join()
    assert len(context.pids()) == 2 and context.results == ["later", "later"]


def _raise(index: int) -> None:
    if index == 1:
        raise OSError("cannot read \udcff.jpg")
    distributed.barrier()


def test_an_exception_is_printed_with_its_device_and_ends_with_17(capfd: Any) -> None:
    with pytest.raises(accelmgr.SpawnError, match=r"rank 1 failed: OSError: cannot read \\udcff\.jpg") as caught:
        xmp.spawn(_raise, nprocs=2, start_method="fork")
    assert caught.value.exit_code == 17
    printed = capfd.readouterr().err
    assert "Exception in device=CPU:1: cannot read \\udcff.jpg\nTraceback" in printed


def test_a_configuration_that_cannot_be_is_refused(monkeypatch: Any) -> None:
    monkeypatch.setenv("ACCELMGR_WORKERS", "worker:0;no port")
    with pytest.raises(ValueError, match="Bad worker syntax: worker:0;no port"):
        xmp.spawn(_raise, nprocs=1, join=False)


def _overlaps(index: int, path: str, executor: Any) -> list[str]:
    def inside() -> str:
        marker = f"{path}/inside"
        os.close(os.open(marker, os.O_CREAT | os.O_EXCL))  # Fails if another rank is inside.
        os.sched_yield()
        os.unlink(marker)
        return "done"

    distributed.barrier()
    return [(executor or SERIAL).run(inside) for _ in range(200)]


@pytest.mark.parametrize("passed_on", [True, False])
def test_the_serial_executor_lets_one_in_at_a_time(tmp_path: Any, passed_on: bool) -> None:
    context = xmp.spawn(
        _overlaps,
        (str(tmp_path), SERIAL if passed_on else None),
        nprocs=3,
        join=False,
        start_method="forkserver" if passed_on else "fork",
    )
    assert context is not None and context.join(100)
    assert context.results == [["done"] * 200] * 3


def test_the_serial_executor_returns_and_raises_what_the_function_does() -> None:
    assert SERIAL.run(lambda: {"a": 1}) == {"a": 1}
    with pytest.raises(ZeroDivisionError):
        SERIAL.run(lambda: 1 / 0)
    assert SERIAL.run(lambda: 2) == 2


def _move(index: int) -> tuple[bool, torch.Tensor]:
    model = WRAPPED.to(torch.device("cpu"))
    return model is WRAPPED.to("cpu"), next(model.parameters()).detach()


def test_the_model_wrapper_gives_every_process_the_model_of_the_host() -> None:
    context = xmp.spawn(_move, nprocs=2, join=False, start_method="fork")
    assert context is not None and context.join(100)
    for same, weight in context.results:
        assert same
        torch.testing.assert_close(weight, next(WRAPPED.to("cpu").parameters()).detach())
