"""Checks managers whose processes are other interpreters (spawn, forkserver): what these do not have of the script is
sent to them, or refused; and managers of scripts that multiprocessing runs."""

from __future__ import annotations

import multiprocessing
import sys

import pytest
import torch
from programs import run_script
from torch import nn

import accelmgr


class Scale(nn.Module):
    def __init__(self, texts: object = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.texts = texts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).mean()


class Holds(torch.utils.data.Dataset):
    """Elements are `values[0]`."""

    def __init__(self, values: object) -> None:
        self.values = values

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.as_tensor(self.values[0]).clone()


def manager_of(model: nn.Module, dataset: object, **options: object) -> accelmgr.Manager:
    return accelmgr.Manager(
        model, dataset, nprocs=1, batch_size_per_device=1, prefetch=1, start_method="forkserver", **options
    )


def test_shared_tensors_of_a_model_and_a_dataset_are_the_same_memory():
    class Shifted(Scale):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + self.texts[0][1]

    values = torch.zeros(2).share_memory_()
    with manager_of(Shifted([values]), Holds(values)) as manager:
        assert manager.step().loss == 0
        values[1] = 3
        assert manager.step().loss == 3
        values[0] = 5
        assert 8.0 in [manager.step().loss for _ in range(5)], "elements that were read ahead come first"


def test_a_dataset_that_has_the_model_reads_its_present_parameters():
    model = Scale()
    with manager_of(model, Holds(nn.ParameterList([model.weight]))) as manager:
        assert manager.step().loss == 1
        with torch.no_grad():
            model.weight.fill_(3)
        assert 9.0 in [manager.step().loss for _ in range(5)]


def test_a_dataset_has_a_proxy_of_multiprocessing():
    with multiprocessing.get_context("fork").Manager() as server:
        values = server.list([2.0])
        with manager_of(Scale(), Holds(values)) as manager:
            assert manager.step().loss == 2


def test_a_set_of_texts_is_refused(monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(accelmgr.ModelError, match=r"'texts' .* list .* PYTHONHASHSEED"):
        manager_of(Scale({"a", "b"}), Holds([1.0]))
    with manager_of(Scale(frozenset(range(9))), Holds([1.0])) as manager:
        assert manager.step().ok


def test_runners_have_the_recursion_limit_of_the_script(monkeypatch):
    class Deep(Scale):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + 0 * self._depth(5000)

        def _depth(self, levels: int) -> int:
            return self._depth(levels - 1) if levels else 0

    before = sys.getrecursionlimit()
    sys.setrecursionlimit(20000)
    try:
        with manager_of(Deep(), Holds([1.0])) as manager:
            assert manager.step().ok
    finally:
        sys.setrecursionlimit(before)


COMPILED = """
import torch, accelmgr

@torch.compile(backend="aot_eager")
def doubled(x):
    return 2 * x

class Net(torch.nn.Linear):
    def forward(self, x):
        return doubled(super().forward(x)).sum()

net = Net(1, 1)
with accelmgr.Manager(net, [torch.ones(1)] * 4, nprocs=1, start_method="forkserver") as manager:
    assert abs(manager.step().loss - 2 * (net.weight + net.bias).item()) < 1e-6
"""


def test_a_compiled_function_of_the_script_travels(tmp_path):
    assert run_script(COMPILED, cwd=tmp_path)[0::2] == (0, "")


PATCHED = """
import sys, torch, accelmgr

def patched(self, x):
    return 10 * torch.nn.functional.linear(x, self.weight)

def make():
    {patch}
    return torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Flatten(0))

model = make()
want = model(torch.ones(1, 1)).item()
model = make if "factory" in sys.argv else model
options = {"nprocs": 1, "batch_size_per_device": 1, "start_method": "forkserver"}
with accelmgr.Manager(model, [torch.ones(1)] * 4, **options) as manager:
    for name, tensor in manager.named_parameters():
        tensor.data.fill_(1)
    assert manager.step().loss == 10, manager.step().loss
"""


@pytest.mark.parametrize(
    ("patch", "named"),
    [
        ("torch.nn.Linear.forward = patched", "forward() of torch.nn.modules.linear.Linear"),
        (
            "torch.nn.functional.linear = lambda x, w, b: 10 * torch._C._nn.linear(x, w)",
            "linear() of torch.nn.functional",
        ),
    ],
)
def test_a_function_of_a_library_that_the_script_has_replaced(tmp_path, patch, named):
    script = PATCHED.replace("{patch}", patch)
    code, _, errors = run_script(script, cwd=tmp_path)
    assert code == 1
    assert "ModelError" in errors
    assert named in errors
    assert run_script(script, "factory", cwd=tmp_path)[0] == 0, "the remedy that the error names"


SPAWNED = """
import multiprocessing, torch, accelmgr

class Net(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x).sum() * 0 + 1

def train():
    with accelmgr.Manager(Net(1, 1), [torch.ones(1)] * 9, nprocs=1, start_method="forkserver") as manager:
        assert manager.step().loss == 1

if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=train)
    process.start()
    process.join()
    assert process.exitcode == 0
"""


def test_a_process_that_multiprocessing_has_spawned_is_a_host(tmp_path):
    """One that forks is in test_refresh.py."""
    code, _, errors = run_script(SPAWNED, cwd=tmp_path)
    assert code == 0, errors
