# Runs in: the courier.
"""The outer parameters and the outer optimizer's state, in a memfd that outlives the courier.

    header A | header B | a slot for each block | what a commit has not copied into slots yet | an accepted mean
    header: sequence, length, SHA-256, JSON: the peer's record, where peers are, the redo list

A commit writes the new blocks behind the slots, then the header that lists them, then the slots. A courier that is
killed at any instant leaves the state before the commit, or the list from which the next one finishes it.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from accelmgr.errors import ConfigError

HEADER_BYTES = 1 << 24
PREFIX = struct.Struct("<QQ32s")
Redo = list[tuple[int, int]]
"""Blocks and their lengths, in the order in which they lie behind the slots."""


def _capacity(shape: Sequence[int]) -> int:
    """Room for a block: its values and at most three tensors of the optimizer like it. Unused pages take no memory."""
    numbers = 1
    for size in shape:
        numbers *= size
    return (8 + 4 * 4 * numbers + 8192 + 63) // 64 * 64


class State:
    """All blocks. A block is one parameter, in float32, with its optimizer's state."""

    def __init__(
        self,
        fd: int,
        shapes: list[tuple[int, ...]],
        initial: Callable[[], list[torch.Tensor]],
        optimizer: Callable[[list[torch.Tensor]], torch.optim.Optimizer],
    ) -> None:
        """initial: the values, if the memfd has none yet. optimizer: makes one of the outer parameters.

        Raises ConfigError: that one cannot make steps of them.
        """
        self._fd = fd
        capacities = [_capacity(shape) for shape in shapes]
        self._slots = _slots(shapes)
        self._capacities, self._redo = capacities, 2 * HEADER_BYTES + sum(capacities)
        self._mean = self._redo + sum(capacities)
        self._sequence, header = _newest(fd)
        self.parameters = [torch.zeros(shape) for shape in shapes]
        self.hashes = [""] * len(shapes)
        self.record: dict[str, Any] | None = None
        self.places: dict[str, str] = {}
        """See Transport.places()."""
        if header is None:
            self.parameters = [value.clone() for value in initial()]
            self._optimizer = optimizer(self.parameters)
            self._try_optimizer()
            for parameter, value in zip(self.parameters, initial(), strict=True):
                parameter.copy_(value)
            self._optimizer = optimizer(self.parameters)
            every = range(len(shapes))
            self._write(every, self._hashed(every, map(self._encoded, every)))
        else:
            self.record, self.places = header["record"], header["places"]
            self._finish(header["redo"])
            self._optimizer = optimizer(self.parameters)
            for index in range(len(shapes)):
                self._load(index, *self._hashed([index], [self.block(index)]))

    # The memfd

    def _write_header(self, redo: Redo) -> None:
        text = json.dumps({"record": self.record, "places": self.places, "redo": redo}).encode()
        if len(text) > HEADER_BYTES - PREFIX.size:
            raise ValueError(f"the record of this peer has {len(text)} bytes; at most {HEADER_BYTES - PREFIX.size} fit")
        sequence = self._sequence + 1
        place = HEADER_BYTES * (sequence % 2)
        digest = hashlib.sha256(struct.pack("<Q", sequence) + text).digest()
        _write_all(self._fd, PREFIX.pack(sequence, len(text), digest) + text, place)
        self._sequence = sequence

    def keep(self, record: dict[str, Any]) -> None:
        """What the peer has said to others is never forgotten."""
        self.record = record
        self._write_header([])

    def keep_mean(self, mean: bytes) -> None:
        """Keeps the mean that this peer is about to accept, until the next commit: nobody else may have it."""
        _write_all(self._fd, struct.pack("<Q", len(mean)) + mean, self._mean)

    def mean(self) -> bytes:
        """What was kept; empty if nothing was."""
        (length,) = struct.unpack("<Q", os.pread(self._fd, 8, self._mean).ljust(8, b"\0"))
        return _read_all(self._fd, length, self._mean + 8)

    def _check_size(self, index: int, data: bytes) -> None:
        if len(data) + 8 > self._capacities[index]:
            raise ValueError(
                f"parameter {index} has {len(data)} bytes with the outer optimizer's state; at most "
                f"{self._capacities[index] - 8} fit: three tensors of the parameter's size"
            )

    def _write(self, blocks: Iterable[int], datas: list[bytes]) -> None:
        redo: Redo = []
        place = self._redo
        for index, data in zip(blocks, datas, strict=True):
            self._check_size(index, data)
            _write_all(self._fd, data, place)
            redo.append((index, len(data)))
            place += len(data)
        self._write_header(redo)
        self._finish(redo, datas)

    def _finish(self, redo: Redo, datas: list[bytes] | None = None) -> None:
        """datas: what lies behind the slots; None: a courier that was killed has put it there."""
        place = self._redo
        for number, (index, length) in enumerate(redo):
            data = _read_all(self._fd, length, place) if datas is None else datas[number]
            _write_all(self._fd, struct.pack("<Q", length), self._slots[index])
            _write_all(self._fd, data, self._slots[index] + 8)
            place += length
        if redo:
            self._write_header([])
            os.ftruncate(self._fd, self._redo)

    def block(self, index: int) -> bytes:
        """As other peers get it."""
        return _block(self._fd, self._slots[index])

    # Blocks

    def _encoded(self, index: int) -> bytes:
        parameter = self.parameters[index]
        tensors = {"parameter": parameter}
        for name, value in self._optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                tensors[f"state.{name}"] = value.contiguous()
            elif isinstance(value, (int, float)):
                tensors[f"number.{name}"] = torch.tensor(float(value), dtype=torch.float64)
        return save(tensors)

    def _load(self, index: int, data: bytes) -> None:
        tensors, parameter = load(data), self.parameters[index]
        parameter.copy_(tensors["parameter"])
        state: dict[str, Any] = {name[6:]: value for name, value in tensors.items() if name.startswith("state.")}
        state |= {name[7:]: float(value) for name, value in tensors.items() if name.startswith("number.")}
        self._optimizer.state.pop(parameter, None)
        if state:
            self._optimizer.state[parameter] = state

    @property
    def digest(self) -> str:
        return digest_of(self.hashes)

    def count(self, blocks: tuple[int, int]) -> int:
        """How many numbers these blocks have."""
        return sum(value.numel() for value in self.parameters[slice(*blocks)])

    def step(self, blocks: tuple[int, int], mean: torch.Tensor, record: Callable[[str], dict[str, Any]]) -> None:
        """Makes the outer step of these blocks with the mean change as gradient.

        record: called with the digest after it; what it returns is committed with the step. Raises ConfigError: the
        optimizer cannot make it, and this object is of no more use.
        """
        begin = 0
        for parameter in self.parameters[slice(*blocks)]:
            parameter.grad = mean[begin : begin + parameter.numel()].view_as(parameter)
            begin += parameter.numel()
        self._commit(range(*blocks), self._stepped(range(*blocks)), record)

    def try_step(self) -> None:
        """Makes a step in this process alone, which is not kept. Raises ConfigError: the optimizer cannot make it."""
        for parameter in self.parameters:
            parameter.grad = torch.zeros_like(parameter)
        self._stepped(range(len(self.parameters)))

    def _stepped(self, blocks: Iterable[int]) -> list[bytes]:
        """These blocks after a step of the optimizer."""
        try:
            self._optimizer.step()
            self._optimizer.zero_grad()
            datas = [self._encoded(index) for index in blocks]
            for index, data in zip(blocks, datas, strict=True):
                self._check_size(index, data)
            return datas
        except Exception as error:
            raise ConfigError(f"the outer optimizer cannot be used: {error!r}", "optimizer") from error

    def _try_optimizer(self) -> None:
        """A round would find out too late what it cannot do. It is to be made anew after this, like the parameters."""
        own = set(map(id, self.parameters))
        has = {id(each) for group in self._optimizer.param_groups for each in group["params"]}
        if has != own:
            raise ConfigError(
                f"the outer optimizer has {len(has & own)} of the {len(own)} parameters that it is given, and "
                f"{len(has - own)} others; it must have all of them, and no other",
                "optimizer",
            )
        self.try_step()

    def take(self, blocks: dict[int, bytes], record: Callable[[str], dict[str, Any]]) -> None:
        """Replaces blocks by those of another peer. Raises ValueError: the blocks have other shapes."""
        for index, data in blocks.items():
            try:
                shape = load(data)["parameter"].shape
            except (KeyError, SafetensorError) as error:
                raise ValueError(f"parameter {index} has other bytes there: {error}") from error
            if shape != self.parameters[index].shape:
                wanted = list(self.parameters[index].shape)
                raise ValueError(f"parameter {index} has the shape {list(shape)} there and {wanted} here")
        for index, data in blocks.items():
            self._load(index, data)
        self._commit(blocks, list(blocks.values()), record)

    def _commit(self, blocks: Iterable[int], datas: list[bytes], record: Callable[[str], dict[str, Any]]) -> None:
        datas = self._hashed(blocks, datas)
        self.record = record(self.digest)
        self._write(blocks, datas)

    def _hashed(self, blocks: Iterable[int], datas: Iterable[bytes]) -> list[bytes]:
        """The same, whose SHA-256 are those of the blocks from now on."""
        datas = list(datas)
        for index, data in zip(blocks, datas, strict=True):
            self.hashes[index] = hashlib.sha256(data).hexdigest()
        return datas


def snapshot(fd: int, shapes: Sequence[tuple[int, ...]]) -> tuple[dict[str, Any], list[bytes]] | None:
    """The record and all blocks as one commit has left them. None: the courier is writing them.

    Any process may call it, at any time.
    """
    header = _newest(fd)[1]
    if header is None or header["record"] is None or header["redo"]:
        return None
    blocks = [_block(fd, slot) for slot in _slots(shapes)]
    digest = digest_of(hashlib.sha256(data).hexdigest() for data in blocks)
    return (header["record"], blocks) if digest == header["record"]["digest"] else None


def _newest(fd: int) -> tuple[int, dict[str, Any] | None]:
    """Sequence and content of the newest header that is whole."""
    newest, found = 0, None
    for place in (0, HEADER_BYTES):
        sequence, length, digest = PREFIX.unpack(os.pread(fd, PREFIX.size, place).ljust(PREFIX.size, b"\0"))
        if sequence <= newest or length > HEADER_BYTES - PREFIX.size:
            continue
        text = os.pread(fd, length, place + PREFIX.size)
        if hashlib.sha256(struct.pack("<Q", sequence) + text).digest() == digest:
            newest, found = sequence, json.loads(text)
    return newest, found


def _slots(shapes: Sequence[Sequence[int]]) -> list[int]:
    """Where the blocks are."""
    return list(itertools.accumulate(map(_capacity, shapes[:-1]), initial=2 * HEADER_BYTES))


def _block(fd: int, slot: int) -> bytes:
    (length,) = struct.unpack("<Q", os.pread(fd, 8, slot).ljust(8, b"\0"))
    return _read_all(fd, length, slot + 8)


def _read_all(fd: int, length: int, place: int) -> bytes:
    data = os.pread(fd, length, place)
    while len(data) < length and (more := os.pread(fd, length - len(data), place + len(data))):
        data += more  # One call reads less than 2 GiB.
    return data


def _write_all(fd: int, data: bytes, place: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, place)
        view, place = view[written:], place + written


def digest_of(hashes: Iterable[str]) -> str:
    return hashlib.sha256("".join(hashes).encode()).hexdigest()
