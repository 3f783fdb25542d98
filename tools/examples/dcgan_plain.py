"""After dcgan of pytorch/examples: generator and discriminator of images, trained in turn on the same batch.

dcgan.py is dcgan_plain.py with accelmgr; moving.md shows their difference. GroupNorm stands where BatchNorm stood:
BatchNorm has the statistics of a runner's part of the batch.
"""

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset


def as_real(output: torch.Tensor) -> torch.Tensor:
    return functional.binary_cross_entropy_with_logits(output, torch.ones_like(output))


def as_fake(output: torch.Tensor) -> torch.Tensor:
    return functional.binary_cross_entropy_with_logits(output, torch.zeros_like(output))


def generator() -> nn.Module:
    return nn.Sequential(
        nn.ConvTranspose2d(16, 32, 3, bias=False), nn.GroupNorm(4, 32), nn.ReLU(),
        nn.ConvTranspose2d(32, 16, 4, 2, 1, bias=False), nn.GroupNorm(4, 16), nn.ReLU(),
        nn.ConvTranspose2d(16, 1, 4, 2, 1), nn.Tanh(),
    )  # fmt: skip


def discriminator() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 4, 2, 1), nn.LeakyReLU(0.2),
        nn.Conv2d(16, 32, 4, 2, 1, bias=False), nn.GroupNorm(4, 32), nn.LeakyReLU(0.2),
        nn.Conv2d(32, 1, 3), nn.Flatten(),
    )  # fmt: skip


class Discs(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Images of a disc that is somewhere, with the noise for the generator beside it."""

    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        y, x = 3 + 6 * torch.rand(2)
        axis = torch.arange(12.0)
        distance = ((axis[:, None] - y) ** 2 + (axis - x) ** 2).sqrt()
        return torch.tanh(3 - distance)[None], torch.randn(16, 1, 1)


def main() -> None:
    torch.manual_seed(1)
    net_g, net_d = generator(), discriminator()
    optimizer_d = torch.optim.Adam(net_d.parameters(), lr=2e-3, betas=(0.5, 0.999))
    optimizer_g = torch.optim.Adam(net_g.parameters(), lr=2e-3, betas=(0.5, 0.999))
    loader = DataLoader(Discs(), batch_size=64)
    for epoch in range(1, 4):
        total_d = total_g = 0.0
        for images, noise in loader:
            optimizer_d.zero_grad()
            made = net_g(noise)
            loss_d = as_real(net_d(images)) + as_fake(net_d(made.detach()))
            loss_d.backward()
            total_d += loss_d.item()
            optimizer_d.step()

            optimizer_g.zero_grad()
            loss_g = as_real(net_d(made))
            loss_g.backward()
            total_g += loss_g.item()
            optimizer_g.step()
        count = len(loader)
        print(f"epoch {epoch}: discriminator {total_d / count:.9f}, generator {total_g / count:.9f}")


if __name__ == "__main__":
    main()
