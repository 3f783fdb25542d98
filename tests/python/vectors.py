"""A dataset of vectors that tests share."""

from __future__ import annotations

from collections.abc import Iterator

import torch


def vectors(size: int, seed: int = 0) -> Iterator[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(size, generator=generator)
        yield {"x": x, "y": torch.stack([x.sum(), x.prod()])}


class Vectors:
    def __init__(self, size: int = 4) -> None:
        self._size = size

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return vectors(self._size)


class Doubles:
    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return ({key: value.double() for key, value in element.items()} for element in vectors(4))
