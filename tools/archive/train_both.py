"""Trains one model on the CPU and on a device, from the same values with the same data, and compares parameters.

usage: train_both.py [DEVICE]   (default: cuda)
"""

import sys

import torch

import accelmgr

STEPS = 20


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.body = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 8))

    def forward(self, x, y):
        return (self.body(x) - y).square().mean()


def elements():
    generator = torch.Generator().manual_seed(2)
    while True:
        x = torch.randn(64, generator=generator)
        yield {"x": x, "y": x[:8] * x[8:16]}


def trained(device):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with accelmgr.Manager(model, elements(), nprocs=1, batch_size_per_device=32, device=device) as manager:
        for result in manager.steps(STEPS, accumulate=False):  # noqa: B007 (the last one is printed)
            optimizer.step()
        print(f"{device}: loss {result.loss:.6f} after {STEPS} steps")
        return [parameter.detach().clone() for parameter in model.parameters()]


if __name__ == "__main__":
    device = sys.argv[1] if len(sys.argv) > 1 else "cuda"
    pairs = list(zip(trained("cpu"), trained(device), strict=True))
    difference = max(((ours - other).norm() / ours.norm()).item() for ours, other in pairs)
    print(f"largest difference of a parameter, relative to its norm: {difference:.2e}")
    if not difference <= 1e-4:
        sys.exit(f"parameters trained on {device} differ from those trained on the CPU")
