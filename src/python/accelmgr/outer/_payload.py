# Runs in: the courier.
"""Numbers as bytes: float32, or 8 or 4 bits by blocks of 256 with a float32 scale each.

All peers that decode the same bytes get the same bits: a code times its scale is one rounding.
"""

from __future__ import annotations

import torch

GROUP = 256
"""Numbers that share a scale. Parts of a payload begin at multiples of it."""
LEVELS = {"int8": 127, "int4": 7}
KINDS = ("float32", *LEVELS)


def encode(values: torch.Tensor, kind: str) -> bytes:
    """values: finite, float32, one dimension."""
    if kind == "float32":
        return values.contiguous().numpy().tobytes()
    rows = torch.nn.functional.pad(values, (0, -len(values) % GROUP)).view(-1, GROUP)
    scales = rows.abs().amax(1) / LEVELS[kind]
    codes = (rows / scales.where(scales > 0, 1.0)[:, None]).round().to(torch.int8)
    if kind == "int4":
        codes = (codes[:, 0::2] & 15) | (codes[:, 1::2] << 4)
    return scales.numpy().tobytes() + codes.contiguous().numpy().tobytes()


def decode(data: bytes, count: int, kind: str) -> torch.Tensor:
    """Raises ValueError if these are no bytes of `count` finite numbers."""
    groups = -(-count // GROUP)
    width = GROUP if kind == "int8" else GROUP // 2
    wanted = 4 * count if kind == "float32" else groups * (4 + width)
    if len(data) != wanted:
        raise ValueError(f"{len(data)} bytes for {count} numbers of {kind}; they have {wanted}")
    if count == 0:
        return torch.zeros(0)
    if kind == "float32":
        values = torch.frombuffer(bytearray(data), dtype=torch.float32)
    else:
        scales = torch.frombuffer(bytearray(data[: 4 * groups]), dtype=torch.float32)
        codes = torch.frombuffer(bytearray(data[4 * groups :]), dtype=torch.int8).view(groups, width)
        if kind == "int4":
            codes = torch.stack(((codes << 4) >> 4, codes >> 4), 2).view(groups, GROUP)
        values = (codes.float() * scales[:, None]).flatten()[:count]
    if not torch.isfinite(values).all():
        raise ValueError("numbers that are not finite")
    return values


def part_of(count: int, index: int, parts: int) -> slice:
    """The numbers that member `index` of `parts` reduces, of `count`."""
    groups = -(-count // GROUP)
    return slice(min(count, groups * index // parts * GROUP), min(count, groups * (index + 1) // parts * GROUP))
