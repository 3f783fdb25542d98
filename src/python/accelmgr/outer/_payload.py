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
AT_ONCE = 256
"""Groups that are encoded at a time: their numbers stay in the cache."""


def encode(values: torch.Tensor, kind: str) -> bytes:
    """values: finite, float32, one dimension."""
    if kind == "float32":
        return values.contiguous().numpy().tobytes()
    groups = -(-len(values) // GROUP)
    scales, codes = torch.empty(groups), torch.empty(groups, _width(kind), dtype=torch.int8)
    numbers = torch.empty(AT_ONCE * GROUP)
    for begin in range(0, groups, AT_ONCE):
        end = min(groups, begin + AT_ONCE)
        part, rows = values[begin * GROUP : end * GROUP], numbers.view(-1, GROUP)[: end - begin]
        numbers[: len(part)].copy_(part)
        numbers[len(part) :].zero_()
        scale = torch.maximum(rows.amax(1), -rows.amin(1)).div_(LEVELS[kind])
        rows.div_(scale.where(scale > 0, 1.0)[:, None]).round_()
        if kind == "int8":
            codes[begin:end].copy_(rows)
        else:
            pairs = rows.to(torch.int8)
            codes[begin:end] = (pairs[:, 0::2] & 15) | (pairs[:, 1::2] << 4)
        scales[begin:end] = scale
    return scales.numpy().tobytes() + codes.numpy().tobytes()


def decode(data: bytes, count: int, kind: str, out: torch.Tensor | None = None) -> torch.Tensor:
    """out: where the numbers are put, with room for whole groups. Raises ValueError as check() does."""
    groups = check(data, count, kind)
    values = torch.empty(groups * GROUP) if out is None else out[: groups * GROUP]
    if kind == "float32":
        values[:count].copy_(_numbers(data, torch.float32))
        return values[:count]
    rows, codes = values.view(-1, GROUP), _numbers(data[4 * groups :], torch.int8).view(groups, _width(kind))
    if kind == "int8":
        rows.copy_(codes)
    else:
        rows[:, 0::2].copy_((codes << 4) >> 4)
        rows[:, 1::2].copy_(codes >> 4)
    rows.mul_(_numbers(data[: 4 * groups], torch.float32)[:, None])
    return values[:count]


def check(data: bytes, count: int, kind: str) -> int:
    """The number of groups. Raises ValueError if these are no bytes of `count` finite numbers."""
    groups = -(-count // GROUP)
    if len(data) != size_of(count, kind):
        raise ValueError(f"{len(data)} bytes for {count} numbers of {kind}; they have {size_of(count, kind)}")
    numbers = _numbers(data if kind == "float32" else data[: 4 * groups], torch.float32)
    if not are_finite(numbers if kind == "float32" else 128 * numbers):  # No code is larger.
        raise ValueError("numbers that are not finite")
    return groups


def size_of(count: int, kind: str) -> int:
    """Bytes of so many numbers."""
    groups = -(-count // GROUP)
    return 4 * count if kind == "float32" else groups * (4 + _width(kind))


def are_finite(values: torch.Tensor) -> bool:
    """The norm is found far faster than each number is looked at, and is finite if they are, up to 1e19."""
    return bool(torch.linalg.vector_norm(values).isfinite() or values.isfinite().all())


def part_of(count: int, index: int, parts: int) -> slice:
    """The numbers that member `index` of `parts` reduces, of `count`."""
    groups = -(-count // GROUP)
    return slice(min(count, groups * index // parts * GROUP), min(count, groups * (index + 1) // parts * GROUP))


def _width(kind: str) -> int:
    """Bytes of a group's codes."""
    return GROUP if kind == "int8" else GROUP // 2


def _numbers(data: bytes, dtype: torch.dtype) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)
