# Runs in: the manager and runners.
"""Reads the model and the dataset that the host has sent (_host/model_sending.py)."""

from __future__ import annotations

import mmap
import os
import pickle
import sys
from collections.abc import Callable
from typing import Any

import torch

from accelmgr._memory.memfd import MAP_NORESERVE, open_memfd, why_not_opened
from accelmgr._memory.placement import aligned, private_copies, slots_of
from accelmgr._model.constants import expect_constants
from accelmgr._model.session_tensors import named_buffers, tensors_of
from accelmgr._process.child import FORKED_OBJECTS
from accelmgr._serialization.pickling import KnownUnpickler, load_dataset
from accelmgr.errors import ModelError, UsageError


class Received:
    """What a host has sent, by the path of its SentModel."""

    def __init__(self, path: str) -> None:
        self._forked = FORKED_OBJECTS.get(path)
        if self._forked is not None:
            return
        if path.startswith("forked:"):
            raise UsageError(
                "the fork server of the runners was lost, and the start method 'fork' cannot start another one"
            )
        pid, objects, values = path.split(":")
        try:
            fd = open_memfd(pid, objects, "accelmgr-objects")
        except OSError as error:
            raise UsageError(why_not_opened(pid, error)) from None
        # Private: what a dataset writes to its tensors is its own. Pages that are only read exist once.
        flags = mmap.MAP_PRIVATE | MAP_NORESERVE
        self._objects = mmap.mmap(fd, 0, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        os.close(fd)
        self._begin = 8 + int.from_bytes(self._objects[:8], "little")
        self._objects.seek(8)
        self._parts = pickle.load(self._objects)
        self._values = (pid, values)
        sys.path[:] = self._parts["path"]

    @property
    def options(self) -> dict[str, Any]:
        options: dict[str, Any] = (self._forked or self._parts)["options"]
        return options

    def _initial(self) -> list[torch.Tensor] | None:
        """Private views of the initial values of buffers, which the caller may change; None if the session has them."""
        try:
            fd = open_memfd(*self._values, "accelmgr-values")
        except OSError:
            return None
        memory = mmap.mmap(fd, 0, access=mmap.ACCESS_COPY)
        os.close(fd)
        return [slot.view(memory) for slot in self._parts["slots"] if slot.kind is None]

    def _tensors(self) -> list[torch.Tensor]:
        # Placeholders: the session has the values, so these pages are never touched.
        slots = self._parts["slots"]
        size = max((slot.offset + slot.extent * slot.dtype.itemsize for slot in slots), default=0)
        memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
        tensors = [slot.view(memory) for slot in slots]
        # A model may resize its buffers.
        buffers = [index for index, slot in enumerate(slots) if slot.kind is None]
        initial = self._initial() or [tensors[index] for index in buffers]
        for index, copy in zip(buffers, private_copies(initial), strict=True):
            tensors[index] = copy
        return [
            tensor if slot.kind is None else _parameter(slot.kind, tensor, slot.requires_grad)
            for tensor, slot in zip(tensors, slots, strict=True)
        ]

    def load(self, what: str) -> Any:
        """Unpickles `dataset` or `collate_fn`."""
        if self._forked is not None:
            return self._forked[what]
        if what != "dataset":
            return self._unpickle(what, [])
        memory = memoryview(self._objects)
        first = aligned(self._begin + sum(self._parts["sizes"].values()))
        buffers = [memory[first + offset : first + offset + size] for offset, size in self._parts["buffers"]]
        begin, size = self._section(what)
        return load_dataset(memory[begin : begin + size], buffers)

    def _section(self, what: str) -> tuple[int, int]:
        begin = self._begin
        for name, size in self._parts["sizes"].items():
            if name == what:
                return begin, size
            begin += size
        raise KeyError(what)

    def _unpickle(self, what: str, tensors: list[torch.Tensor]) -> Any:
        self._objects.seek(self._section(what)[0])
        return KnownUnpickler(self._objects, tensors).load()

    def _expect_constants(self, model: torch.nn.Module) -> torch.nn.Module:
        expect_constants(model, self.options["grown"], self.options["constants"])
        return model

    def model(self) -> torch.nn.Module:
        """Makes the model. It has the initial values, unless these are in the session already."""
        if self._forked is not None:
            model = self._expect_constants(self._forked["model"])
            for parameter in model.parameters():  # The host's gradients are not those of a replica.
                parameter.grad = None
            # Private ones, also if the host has them in shared memory.
            buffers = [buffer for _, buffer in named_buffers(model)]
            for buffer, copy in zip(buffers, private_copies(buffers), strict=True):
                buffer.data = copy
            return model
        if self._parts["factory"]:
            return self._made(self._unpickle("model", []))
        tensors = self._tensors()
        model, attached = self._unpickle("model", tensors)
        for found in attached:
            found.attach(tensors[found.number])
        return self._expect_constants(model)

    def _made(self, factory: Callable[[], torch.nn.Module]) -> torch.nn.Module:
        model = self._expect_constants(factory())
        tensors = tensors_of(model)
        slots = self._parts["slots"]
        found, expected = [
            [(entry.name, tuple(entry.shape), entry.dtype) for entry in entries]
            for entries in (slots_of(tensors)[0], slots)
        ]
        if found != expected:
            other = next(
                (f"{one} here and {two} there" for one, two in zip(found, expected, strict=False) if one != two),
                f"{len(found)} tensors here and {len(expected)} there",
            )
            raise ModelError(f"the function that makes the model made a different model in the host: {other}")
        initial = self._initial()
        with torch.no_grad():
            for (_, tensor), value in zip(tensors[-len(initial) :], initial, strict=True) if initial else ():
                tensor.copy_(value)
        return model


def _parameter(kind: type[torch.Tensor], tensor: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    if kind is torch.Tensor:  # Inside a quantized parameter, or a tensor of `extra`.
        return tensor.requires_grad_(requires_grad)
    if kind is torch.nn.Parameter:
        return torch.nn.Parameter(tensor, requires_grad=requires_grad)
    made: torch.Tensor = torch.Tensor._make_subclass(kind, tensor, requires_grad)
    return made
