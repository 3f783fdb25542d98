"""Runs accelmgr.Manager for `tools/bench/run python`, with the nn.Module, data and optimizer of the peers of
mlp_step.py. Prints lines of the contract. The last ones are the cost of the Python binding over the C++ handle.

usage: python_manager.py --parameters 1|17|67|256 [--start-method spawn|fork] [--quick]
"""

from __future__ import annotations

import argparse
import os
import pathlib
import statistics
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).parent / "peers"))

import common
import mlp
import torch
from mlp_step import WARMUP_CYCLES, cycles

import accelmgr

BINDING_STEPS = 2000


class Net(torch.nn.Module):
    """The peers' model, with the loss as its output."""

    def __init__(self, millions: str) -> None:
        super().__init__()
        self.body = mlp.make_model(millions)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return mlp.loss_of(self.body, (inputs, targets))


class Resident(torch.utils.data.Dataset):
    """The peers' elements, in memory and without an end."""

    def __init__(self, millions: str) -> None:
        self.inputs, self.targets = mlp.make_elements(millions, seed=1)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        row = index % len(self.inputs)
        return self.inputs[row], self.targets[row]


def measure_training(name: str, millions: str, start_method: str, quick: bool) -> None:
    case = millions + "M"
    model, data = Net(millions), Resident(millions)
    begin = time.perf_counter()
    with accelmgr.Manager(
        model,
        data,
        nprocs=mlp.RUNNERS,
        batch_size_per_device=mlp.BATCH_SIZE,
        prefetch=2 * mlp.BATCH_SIZE,
        deterministic=False,  # As in the peers.
        step_timeout=300,
        runners={"threads": mlp.THREADS},
        start_method=start_method,
    ) as manager:
        manager.step(accumulate=False).raise_for_status()
        common.emit(name, case, "first_step", (time.perf_counter() - begin) * 1e3, "ms")
        check_views(manager, model)
        torch.set_num_threads(os.cpu_count() or 1)  # For the optimizer: the runners sleep meanwhile.
        optimizer = mlp.make_optimizer(model.parameters())

        def cycle() -> None:
            manager.step(accumulate=False).raise_for_status()
            optimizer.step()

        common.emit(name, case, "cycle", common.time_cycles(cycle, WARMUP_CYCLES, cycles(millions, quick)), "ms")


def check_views(manager: accelmgr.Manager, model: torch.nn.Module) -> None:
    """Exits with an error unless all parameters and gradients of the model are views of the session."""
    own = {t.data_ptr() for _, t in manager.named_parameters()} | {t.data_ptr() for _, t in manager.named_gradients()}
    for name, parameter in model.named_parameters():
        if parameter.data_ptr() not in own or parameter.grad is None or parameter.grad.data_ptr() not in own:
            sys.exit(f"python_manager.py: {name} is no view of the session")


def measure_binding(millions: str, steps: int) -> None:
    """Measures the time of manager.step() in Python beyond that of the C++ handle, which the result has. The model is
    tiny, so that work for each parameter counts and computing does not."""
    shape = mlp.SHAPES["shapes"][millions]
    mlp_config = {"input_size": 8, "hidden_size": 8, "hidden_layers": shape["hidden_layers"], "output_size": 2}
    with accelmgr.Manager(
        "mlp",
        "synthetic",
        config={"model": {"mlp": mlp_config}},
        nprocs=1,
        batch_size_per_device=1,
        prefetch=16,
        step_timeout=60,
        runners={"threads": 1},
    ) as manager:
        beyond, native = [], []
        for step in range(-100, steps):
            begin = time.perf_counter_ns()
            result = manager.step(accumulate=False)
            us = (time.perf_counter_ns() - begin) / 1e3
            if step >= 0:
                beyond.append(us - result.step_ms * 1e3)
                native.append(result.step_ms * 1e3)
        parameters = len(manager.named_parameters())
    common.emit("ours", "binding", "native_step", statistics.median(native), "us", parameters=parameters)
    common.emit("ours", "binding", "binding", statistics.median(beyond), "us", parameters=parameters)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", required=True, choices=list(mlp.SHAPES["shapes"]), help="millions")
    parser.add_argument("--start-method", choices=["spawn", "fork"], default="spawn", help="fork: as the peers do")
    parser.add_argument("--quick", action="store_true", help="fewer cycles")
    arguments = parser.parse_args()
    # Leaves malloc's settings as they are, unlike the peers' hosts, whose runners inherit them by fork. So malloc
    # returns the first memory of the model.
    torch.set_num_threads(1)
    name = "ours" if arguments.start_method == "spawn" else "ours_fork"
    measure_training(name, arguments.parameters, arguments.start_method, arguments.quick)
    if name == "ours" and arguments.parameters == "1":
        measure_binding(arguments.parameters, BINDING_STEPS // 4 if arguments.quick else BINDING_STEPS)


if __name__ == "__main__":
    main()
