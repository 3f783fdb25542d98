# Runs in: the host, which reads; runners, which write.
"""Dtypes and shapes that the first micro-batch gives to buffers, and to attributes that are kept as buffers are.

Runners write them into a memfd of the host, which starts again with room for them: an error's text may be cut, so it is
for people alone. A run that resumes finds them in the checkpoint.
"""

from __future__ import annotations

import json
import os
import pathlib
import struct

import torch

from accelmgr._memory.memfd import HostFile, open_memfd
from accelmgr._memory.tensors import dtype_name

NAME = "accelmgr-grown"

Form = tuple[str, tuple[int, ...]]
"""A dtype's name, and a shape."""
Forms = dict[str, Form]
"""Forms by the name of the buffer."""

DTYPES = {
    **{f"{kind}{bits}": f"{name}{bits}" for kind, name in (("I", "int"), ("U", "uint")) for bits in (8, 16, 32, 64)},
    **{f"F{bits}": f"float{bits}" for bits in (16, 32, 64)},
    "BF16": "bfloat16",
    "BOOL": "bool",
    "C64": "complex64",
    "C128": "complex128",
}
"""The dtypes that a kept attribute may have, by their names in safetensors files."""


def form_of(tensor: torch.Tensor) -> Form:
    return dtype_name(tensor.dtype), tuple(tensor.shape)


class GrownBuffers(HostFile):
    """The side of the host."""

    def __init__(self) -> None:
        super().__init__(NAME)

    def read(self) -> Forms:
        """The forms that all runners have told. If several told of one buffer, the last form counts."""
        content = os.pread(self.fd, os.fstat(self.fd).st_size, 0)
        *lines, _ = content.split(b"\n")
        told = [form for line in lines for form in json.loads(line).items()]
        return {name: (dtype, tuple(shape)) for name, (dtype, shape) in told}


def tell(address: str, forms: Forms) -> None:
    """The side of a runner. One write: other runners may tell at the same time."""
    pid, fd = address.split(":")
    file = open_memfd(pid, fd, NAME, os.O_WRONLY | os.O_APPEND)
    try:
        os.write(file, json.dumps(forms).encode() + b"\n")
    finally:
        os.close(file)


def saved(checkpoint: str) -> Forms:
    """The forms of rank 0's buffers in a checkpoint."""
    prefix = "rank0/buffers/"
    with (pathlib.Path(checkpoint) / "training.safetensors").open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(size))
    return {
        name.removeprefix(prefix): (DTYPES[entry["dtype"]], tuple(entry["shape"]))
        for name, entry in header.items()
        if name.startswith(prefix) and entry["dtype"] in DTYPES
    }
