"""What torch_xla itself takes for a step whose parameters come from the host and whose gradients go there, in one
process: it sends parameters and a batch to the device, computes, and reads loss and gradients.

usage: xla_step.py --parameters 1|17 [--quick]
"""

import argparse
import os

import common
import mlp

os.environ["PJRT_DEVICE"] = "CPU"
os.environ["PJRT_NPROC"] = str(mlp.THREADS)

import torch
import torch_xla
import torch_xla.core.xla_model as xm
from mlp_step import WARMUP_CYCLES, cycles


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", required=True, choices=list(mlp.SHAPES["shapes"]), help="millions")
    parser.add_argument("--quick", action="store_true", help="fewer cycles")
    arguments = parser.parse_args()
    common.share_one_arena()
    common.settle_torch(mlp.THREADS)
    model = mlp.make_model(arguments.parameters)
    host = [parameter.detach().clone() for parameter in model.parameters()]
    device = torch_xla.device()
    model.to(device)
    batches = mlp.resident_batches(arguments.parameters, seed=1)
    parameters = list(model.parameters())

    def cycle():
        for parameter, value in zip(parameters, xm.send_cpu_data_to_device(host, device), strict=True):
            parameter.data = value
            parameter.grad = None
        loss = mlp.loss_of(model, xm.send_cpu_data_to_device(list(next(batches)), device))
        loss.backward()
        torch_xla.sync()
        torch._to_cpu([loss.detach(), *(parameter.grad for parameter in parameters)])

    count = cycles(arguments.parameters, arguments.quick)
    time = common.time_cycles(cycle, WARMUP_CYCLES, count)
    common.emit("torch_xla", arguments.parameters + "M", "cycle", time, "ms")


if __name__ == "__main__":
    main()
