"""Checks that results of a step survive pickle and JSON, and that numbers beyond the limit give one warning."""

from __future__ import annotations

import copy
import json
import math
import pathlib
import pickle
import re

import pytest
import torch
from gate import Count, Told
from torch import nn

import accelmgr


class Scalars(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.count = count

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor | float]:
        numbers: dict[str, torch.Tensor | float] = {f"number {i}": float(i) for i in range(self.count)}
        return {"loss": (x * self.weight).mean(), **numbers}


def test_a_result_travels() -> None:
    with accelmgr.Manager(Scalars(2), Count(), nprocs=2, runners__threads=1) as manager:
        result = manager.step()
    everything = result.to_dict()
    assert everything["status"] == "ok" and everything["counted"] is True and everything["causes"] == []
    assert everything["scalars"] == result.scalars == {"number 0": 0.0, "number 1": 1.0}
    for name, value in everything.items():
        assert value == getattr(result, name), name
    missing = {name for name in dir(type(result)) if not name.startswith("_")} - set(everything)
    assert missing == {"ok", "to_dict", "raise_for_status"}
    assert json.loads(json.dumps(everything)) == everything
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        again = pickle.loads(pickle.dumps(result, protocol))
        assert again.to_dict() == everything and again.ok and tuple(again) == tuple(result)
    assert copy.deepcopy(result).to_dict() == everything


def test_a_failed_result_travels_with_its_causes(tmp_path: pathlib.Path) -> None:
    model = Told(tmp_path)
    with accelmgr.Manager(model, Count(), nprocs=1, runners={"threads": 1, "on_loss": "fail"}) as manager:
        model.tell("die")
        result = manager.step()
    assert (result.status, len(result.causes)) == ("runner_lost", 1)
    assert math.isnan(result.loss), "0 would look like a loss"
    again = pickle.loads(pickle.dumps(result))
    assert again.to_dict() == result.to_dict() and not again
    cause = again.causes[0]
    assert (cause.rank, cause.exit, cause.pid) == (0, "killed by signal 9 (KILL)", result.causes[0].pid)
    assert pickle.loads(pickle.dumps(cause)).to_dict() == cause.to_dict() == result.to_dict()["causes"][0]
    json.dumps(result.to_dict())
    with pytest.raises(accelmgr.RunnerLost, match="signal 9"):
        again.raise_for_status()


def test_a_timeout_that_is_none_is_refused_and_no_step_is_made() -> None:
    with accelmgr.Manager(Scalars(0), Count(), nprocs=1, runners__threads=1) as manager:
        for timeout in (-1, -0.001, math.nan, -math.inf):
            with pytest.raises(accelmgr.UsageError, match=f"timeout is {timeout:g}; it must be a number of seconds"):
                manager.step(timeout=timeout)
        assert manager.step(timeout=math.inf).step == 1


def test_numbers_beyond_those_that_are_carried_are_left_out_with_one_warning(capfd: pytest.CaptureFixture[str]) -> None:
    model = Scalars(20)
    with accelmgr.Manager(model, Count(), nprocs=2, grad_accumulation_steps=2, runners__threads=1) as manager:
        for _ in range(3):
            result = manager.step()
            assert result.ok and result.scalars == pytest.approx({f"number {i}": i for i in range(16)})
    told = re.findall("warning .*", capfd.readouterr().err)
    assert len(told) == 1 and "'number 16', 'number 17', 'number 18', 'number 19'" in told[0], told
