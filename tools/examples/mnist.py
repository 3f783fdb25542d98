"""After mnist of pytorch/examples: a convolutional network with dropout learns ten classes of images.

mnist.py is mnist_plain.py with accelmgr; moving.md shows their difference.
"""

import torch
from torch import nn
from torch.nn import functional
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

import accelmgr


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3)
        self.conv2 = nn.Conv2d(8, 16, 3)
        self.dropout = nn.Dropout(0.25)
        self.fc1 = nn.Linear(16 * 4 * 4, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.relu(self.conv2(functional.relu(self.conv1(x))))
        x = functional.relu(self.fc1(self.dropout(functional.max_pool2d(x, 2).flatten(1))))
        return functional.log_softmax(self.fc2(self.dropout(x)), dim=1)


def images(count: int, seed: int) -> TensorDataset:
    """Ten patterns with noise, in place of digits that were to be downloaded."""
    patterns = torch.randn(10, 1, 12, 12, generator=torch.Generator().manual_seed(0))
    own = torch.Generator().manual_seed(seed)
    target = torch.randint(10, (count,), generator=own)
    return TensorDataset(patterns[target] + 2 * torch.randn(count, 1, 12, 12, generator=own), target)


def accuracy(model: nn.Module, dataset: TensorDataset) -> float:
    data, target = dataset.tensors
    model.eval()
    with torch.no_grad():
        correct = (model(data).argmax(1) == target).double().mean()
    model.train()
    return correct.item()


def main() -> None:
    torch.manual_seed(1)
    loader = DataLoader(images(2000, 1), batch_size=64, shuffle=True, generator=torch.Generator().manual_seed(1))
    model = Net()
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    manager = accelmgr.Manager(model, loader, loss=functional.nll_loss, data={"epochs": 3}, seed_base=1)
    for epoch in range(1, 4):
        total = 0.0
        for loss, _ in manager.steps(len(loader)):
            total += loss
            optimizer.step()
            optimizer.zero_grad()
        print(f"epoch {epoch}: loss {total / len(loader):.9f}, accuracy {accuracy(model, images(500, 2)):.1%}")
        scheduler.step()


if __name__ == "__main__":
    main()
