"""Functions that tests name as model.factory or data.factory, good ones and bad ones."""

import torch
from torch import nn

NOT_CALLABLE = 3


class Scaled(nn.Module):
    def __init__(self, count: int):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.scale * x.unsqueeze(-1)).mean()


def model(count: str = "3") -> nn.Module:
    return Scaled(int(count))


def frozen(count: str = "3") -> nn.Module:
    """The model, and a second parameter, which is frozen."""
    module = Scaled(int(count))
    module.offset = nn.Parameter(torch.zeros(2), requires_grad=False)
    return module


def text() -> str:
    return "no model"


def broken() -> nn.Module:
    raise LookupError("no weights here")


def without_parameters() -> nn.Module:
    return nn.ReLU()


def data(count: str = "8") -> list[torch.Tensor]:
    return [torch.tensor(float(i)) for i in range(int(count))]


def endless() -> object:
    return (torch.tensor(float(i)) for i in range(8))


def quantized_data() -> list[torch.Tensor]:
    return [torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8)]


def batches() -> object:
    return torch.utils.data.DataLoader(data(), batch_size=2)
