"""A step on a GPU whose parameters come from the host's memory and whose gradients go there, without accelmgr.

usage: gpu_step.py --mode compute|fused|plain_copies|ddp|ddp_fused [--device cuda|cpu] [--model small|tiny] [--quick]

compute: forward and backward alone: parameters and gradients stay on the device.
plain_copies: all parameters are copied to the device before forward, all gradients to the host after backward.
ddp: the same, with DistributedDataParallel around the model, whose world is this process.
fused: compute, and AdamW as one kernel on the device: plain PyTorch on one GPU.
ddp_fused: what a script without a host does: DistributedDataParallel, and AdamW as one kernel on the device. No copies.
"""

import argparse
import os
import tempfile

import common
import gpt2
import torch

WARMUP_CYCLES = 6  # CUDA graphs are recorded in the fourth step.


def cycles(quick):
    return 5 if quick else 30


class Host:
    """Parameters and gradients in the host's memory; page-locked, so that copies are as fast as they can be."""

    def __init__(self, model, device):
        self.device, self.model = device, model
        pinned = device.type == "cuda"
        self.parameters = [torch.empty_like(p, device="cpu", pin_memory=pinned) for p in model.parameters()]
        self.gradients = [torch.empty_like(p, device="cpu", pin_memory=pinned) for p in model.parameters()]
        for values, parameter in zip(self.parameters, model.parameters(), strict=True):
            values.copy_(parameter.detach())

    @torch.no_grad()
    def send_parameters(self):
        for values, parameter in zip(self.parameters, self.model.parameters(), strict=True):
            parameter.copy_(values, non_blocking=True)

    def fetch_gradients(self):
        for values, parameter in zip(self.gradients, self.model.parameters(), strict=True):
            values.copy_(parameter.grad, non_blocking=True)


def wrapped(model, device):
    """DistributedDataParallel in a world of one process."""
    from torch.nn.parallel import DistributedDataParallel

    backend = "nccl" if device.type == "cuda" and torch.distributed.is_nccl_available() else "gloo"
    store = os.path.join(tempfile.mkdtemp(prefix="accelmgr-bench-"), "store")
    torch.distributed.init_process_group(backend, init_method=f"file://{store}", rank=0, world_size=1)
    return DistributedDataParallel(model, device_ids=[0] if device.type == "cuda" else None)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mode", required=True, choices=["compute", "fused", "plain_copies", "ddp", "ddp_fused"])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--model", default="small", choices=list(gpt2.SHAPES))
    parser.add_argument("--quick", action="store_true", help="fewer cycles")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    model = gpt2.make_model(arguments.model).to(device)
    host = Host(model, device) if arguments.mode in ("plain_copies", "ddp") else None
    network = wrapped(model, device) if arguments.mode.startswith("ddp") else model
    optimizer = torch.optim.AdamW(model.parameters(), fused=True) if arguments.mode.endswith("fused") else None
    batches, losses = gpt2.batches(arguments.model), []

    def cycle():
        tokens, targets = (values.to(device, non_blocking=True) for values in next(batches))
        if host is not None:
            host.send_parameters()
        for parameter in model.parameters():
            parameter.grad = None
        with torch.autocast(device.type, torch.bfloat16):
            loss = network(tokens, targets)
        loss.backward()
        if host is not None:
            host.fetch_gradients()
        if optimizer is not None:
            optimizer.step()
        losses.append(loss.item())  # Waits for the device, and so for the copies before it.

    time = common.time_cycles(cycle, WARMUP_CYCLES, cycles(arguments.quick))
    common.emit(arguments.mode, arguments.model, "step", time, "ms")
    common.emit(arguments.mode, arguments.model, "first_loss", losses[0], "nats")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
