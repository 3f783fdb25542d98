"""Trains the built-in GPT of configs/gpt-licenses.yaml with an optimizer and a schedule of torch.

    python tools/examples/torch_optim.py [--steps 300] [--set key=value ...]

The runners have no Python: the model and the data are built into accelmgr. An optimizer of torch takes
`manager.parameters()`. Their memory is that of the master parameters, and their `.grad` is the mean gradient of all
runners.
"""

from __future__ import annotations

import argparse
import pathlib

import torch

import accelmgr

CONFIG = pathlib.Path(__file__).resolve().parents[2] / "configs" / "gpt-licenses.yaml"


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--steps", type=int, default=300)
    arguments.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="keys of the configuration")
    given = arguments.parse_args()
    options = dict(setting.split("=", 1) for setting in given.set)
    with accelmgr.Manager("gpt", "text", config=CONFIG, **options) as manager:
        matrices = [parameter for parameter in manager.parameters() if parameter.dim() > 1]
        others = [parameter for parameter in manager.parameters() if parameter.dim() <= 1]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=2e-3, betas=(0.9, 0.95), fused=True)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-3, total_steps=given.steps, pct_start=0.1)
        manager.check_optimizer(optimizer)
        for result in manager.steps(given.steps):
            torch.nn.utils.clip_grad_norm_(manager.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            manager.zero_grad()
            if result.step % 20 == 0 or result.step == given.steps:
                print(f"step {result.step}: loss {result.loss:.3f}, {result.samples} samples, {result.step_ms:.0f} ms")


if __name__ == "__main__":
    main()
