"""Tensors on CUDA devices, in collectives of the engine: all that these ask of torch.cuda."""

from __future__ import annotations

import contextlib
from typing import Any

import torch


class Devices:
    """The GPUs of this process."""

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is on one of them."""
        return tensor.device.type == "cuda"

    def place_of(self, tensor: torch.Tensor) -> tuple[int, int]:
        """The number of its device, and the address of the stream that computes there."""
        index = tensor.get_device()
        return index, int(torch.cuda.current_stream(index).cuda_stream)

    def computing(self, tensor: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
        """In the block, the tensor's device is the current one."""
        return torch.cuda.device(tensor.get_device())

    def empty(self, shape: list[int], like: torch.Tensor) -> torch.Tensor:
        return torch.empty(shape, dtype=like.dtype, device=like.device)

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.cpu()

    def from_host(self, tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        return tensor.to(like.device)

    def home(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor on the current device of this process; as it is where torch sees no GPU."""
        return tensor.cuda() if torch.cuda.is_available() else tensor


devices = Devices()
