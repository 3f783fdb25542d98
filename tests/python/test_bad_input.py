"""Checks that bad input is refused with a clear message, before a process starts where that is possible."""

import threading

import pytest
import torch
from gate import Count
from torch import nn

import accelmgr
from accelmgr._runner.replica import Replica


class Unpicklable(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.inner.guard = threading.Lock()


def lazy():
    return nn.Sequential(nn.LazyLinear(2))


def per_sample():
    """As a GradSampleModule of opacus."""
    model = nn.Linear(2, 2)
    model.weight.grad_sample = None
    return model


REFUSED = {
    "no_module": (lambda: "a string of no kind", {}, accelmgr.ConfigError, "model.kind"),
    "a_function": (lambda: print, {}, accelmgr.ModelError, "print, which must return a torch.nn.Module, returned"),
    "no_parameters": (nn.ReLU, {}, accelmgr.ModelError, "no parameters; there is nothing to train"),
    "elsewhere": (lambda: nn.Linear(2, 2, device="meta"), {}, accelmgr.ModelError, "'weight' of the model is on meta"),
    "lazy": (lazy, {}, accelmgr.ModelError, "'0.weight' of the model is not initialized; call the model once"),
    "per_sample": (per_sample, {}, accelmgr.ModelError, "parameter 'weight' has a grad_sample"),
    "unpicklable": (
        Unpicklable,
        {"start_method": "spawn"},
        accelmgr.ModelError,
        r"model.inner.guard \(_thread.lock\) cannot be pickled",
    ),
    "no_batch": (lambda: nn.Linear(2, 2), {"batch_size_per_device": 0}, accelmgr.ConfigError, "batch_size_per_device"),
    "no_start_method": (lambda: nn.Linear(2, 2), {"start_method": "it"}, accelmgr.ConfigError, "start_method is 'it'"),
    "collate": (lambda: nn.Linear(2, 2), {"collate_fn": "stack"}, accelmgr.ConfigError, "collate_fn is a str"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_before_anything_starts(case):
    make, options, error, message = REFUSED[case]
    model = make()
    with pytest.raises(error, match=message):
        accelmgr.Manager(model, Count(), **{"nprocs": 1, **options})


class Returns(nn.Module):
    """Returns an output that is no loss."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x):
        return self.weight * x


def test_an_output_that_is_no_loss_is_the_error_of_the_step():
    with accelmgr.Manager(Returns(), Count(), nprocs=1, runners__threads=1, runners__on_loss="fail") as manager:
        result = manager.step()
        assert (result.status, result.error_type, result.rank) == ("runner_lost", "ModelError", 0)
        with pytest.raises(accelmgr.ModelError, match=r"the loss is torch.float32 of shape \[1, 2\]; it must be one"):
            result.raise_for_status()


def test_an_error_of_torch_says_what_forward_was_given():
    replica = Replica(nn.Linear(3, 1), None)
    given = r"\(forward\(\) was given input float32 \[2, 4\]\)\nTraceback"
    with pytest.raises(accelmgr.ModelError, match=f"^RuntimeError: (addmm: )?mat1 and mat2 shapes .* {given}"):
        replica._forward({"input": torch.ones(2, 4)})


class NoRows:
    def __iter__(self):
        raise LookupError("the file has no rows")


def test_the_model_of_a_manager_that_did_not_start_is_as_it_was():
    model = Returns()
    with pytest.raises(accelmgr.DataError, match="LookupError: the file has no rows"):
        accelmgr.Manager(model, NoRows(), nprocs=1)
    assert "memfd:accelmgr" not in open("/proc/self/maps").read()
    assert model.weight.tolist() == [1, 1]
    with accelmgr.Manager(model, Count(), nprocs=1, runners__on_loss="fail") as manager:  # No manager owns it.
        assert manager.step().status == "runner_lost"
