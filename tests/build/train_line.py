"""Trains with the installed package, and prints the path of the package."""

import torch

import accelmgr


class Line(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(3))

    def forward(self, x, y):
        return {"loss": (x @ self.weight - y).square().mean()}


def elements():
    generator = torch.Generator().manual_seed(1)
    while True:
        x = torch.randn(3, generator=generator)
        yield {"x": x, "y": x.sum()}


if __name__ == "__main__":
    model = Line()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    with accelmgr.Manager(model, elements(), nprocs=2, batch_size_per_device=8) as manager:
        for result in manager.steps(20):  # noqa: B007 (the last one is looked at)
            optimizer.step()
            manager.zero_grad()
    assert result.loss < 0.05, result
    print(accelmgr.__file__)
