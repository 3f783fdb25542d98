"""How a model and a dataset get from the host to the manager and its runners.

Two memfds, found by the others through /proc. One holds what cloudpickle makes of model, dataset and collate_fn, in
which the model's parameters and buffers are mere numbers; it lasts as long as runners may be started. The other holds
the initial values of these tensors; the host's own tensors are moved there meanwhile, so that they exist once, and it
gives its memory back when the session has them. A manager that is a fork of the host needs the second one only.
"""

from __future__ import annotations

import dataclasses
import io
import mmap
import os
import pickle
import sys
import weakref
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, BinaryIO

import cloudpickle
import torch

from accelmgr.errors import DataError, ModelError, UsageError

ALIGNMENT = 64


@dataclasses.dataclass(frozen=True)
class Slot:
    """Where a tensor of the model lies among the values."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    requires_grad: bool
    is_parameter: bool

    @property
    def elements(self) -> int:
        return int(torch.Size(self.shape).numel())


def tensors_of(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Parameters, then buffers, each tensor once under its first name."""
    for name, parameter in model.named_parameters():
        if isinstance(parameter, torch.nn.parameter.UninitializedParameter):
            raise ModelError(f"parameter '{name}' of the model is not initialized; call the model once first")
    return [*model.named_parameters(), *model.named_buffers()]


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    def __init__(self, file: BinaryIO, numbers: Mapping[int, int]) -> None:
        super().__init__(file)
        self._numbers = numbers

    def persistent_id(self, obj: Any) -> int | None:
        return self._numbers.get(id(obj)) if isinstance(obj, torch.Tensor) else None


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: BinaryIO, tensors: list[torch.Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, pid: int) -> torch.Tensor:
        return self._tensors[pid]


def _culprit(value: Any, path: str, depth: int = 4) -> str:
    """The attribute, as far down as one alone is at fault, that cannot be pickled."""
    attributes: dict[Any, Any] = {}
    if isinstance(value, torch.nn.Module):
        attributes = {**value.__dict__.get("_modules", {})}
        attributes |= {k: v for k, v in value.__dict__.items() if not k.startswith("_")}
    elif isinstance(value, dict):
        attributes = value
    elif hasattr(value, "__dict__"):
        attributes = vars(value)
    for name, attribute in attributes.items() if depth > 0 else ():
        try:
            cloudpickle.dumps(attribute)
        except Exception:
            return _culprit(attribute, f"{path}.{name}", depth - 1)
    return f"{path} ({type(value).__module__}.{type(value).__qualname__})"


def pickled(what: str, value: Any, numbers: Mapping[int, int] = MappingProxyType({})) -> bytes:
    """Raises DataError, or ModelError for the model, that names what cannot be pickled."""
    file = io.BytesIO()
    try:
        _Pickler(file, numbers).dump(value)
    except Exception as error:
        kind = ModelError if what == "model" else DataError
        raise kind(
            f"{_culprit(value, what)} cannot be pickled, as every start method but 'fork' needs: "
            f"{type(error).__name__}: {error}"
        ) from error
    return file.getvalue()


def _memfd(name: str, size: int) -> int:
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    os.ftruncate(fd, max(size, 1))
    return fd


def _views(values: mmap.mmap, slots: list[Slot]) -> list[torch.Tensor]:
    return [
        torch.frombuffer(values, dtype=slot.dtype, count=slot.elements, offset=slot.offset).view(slot.shape)
        if slot.elements
        else torch.empty(slot.shape, dtype=slot.dtype)
        for slot in slots
    ]


class Values:
    """The tensors of a model, in memory that all processes may map. They are moved there by move()."""

    def __init__(self, model: torch.nn.Module | None) -> None:
        tensors = tensors_of(model) if model is not None else []
        self.slots: list[Slot] = []
        end = 0
        for name, tensor in tensors:
            if tensor.device.type != "cpu" or tensor.layout != torch.strided:
                raise ModelError(
                    f"'{name}' of the model is on {tensor.device}, {tensor.layout}; pass the model on the CPU, dense: "
                    "the runners have replicas of their own"
                )
            is_parameter = isinstance(tensor, torch.nn.Parameter)
            self.slots.append(Slot(tensor.dtype, tuple(tensor.shape), end, tensor.requires_grad, is_parameter))
            end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        self.tensors = [tensor for _, tensor in tensors]
        self._bytes = max(end, 1)
        self.fd = -1

    def move(self) -> None:
        self.fd = _memfd("accelmgr-values", self._bytes)
        self._memory = mmap.mmap(self.fd, self._bytes)
        with torch.no_grad():
            for tensor, view in zip(self.tensors, _views(self._memory, self.slots), strict=True):
                view.copy_(tensor)
                tensor.data = view

    def release(self) -> None:
        """What still lies there gets memory of its own, and this goes: in forks of this process too. Idempotent."""
        if self.fd < 0:
            return
        first = torch.frombuffer(self._memory, dtype=torch.uint8).data_ptr()
        for tensor in self.tensors:
            if first <= tensor.data_ptr() < first + self._bytes:
                tensor.data = tensor.data.clone()
        self._memory.madvise(mmap.MADV_REMOVE)
        os.close(self.fd)
        self.fd, self.tensors = -1, []
        del self._memory


class Payload:
    """Of the host. `dataset` is what pickled() made."""

    def __init__(self, model: torch.nn.Module | None, dataset: bytes, collate_fn: Any, options: dict[str, Any]) -> None:
        self._values = Values(model)
        numbers = {id(tensor): number for number, tensor in enumerate(self._values.tensors)}
        parts = {
            "path": list(sys.path),
            "options": options,
            "slots": self._values.slots,
            "model": pickled("model", model, numbers),
            "dataset": dataset,
            "collate_fn": pickled("collate_fn", collate_fn),
        }
        # By value where the class is: what is defined in __main__ travels too.
        data = pickle.dumps(parts, protocol=pickle.HIGHEST_PROTOCOL)
        self._objects = _memfd("accelmgr-objects", len(data))
        self._closing = weakref.finalize(self, os.close, self._objects)  # Also for who drops its manager.
        with os.fdopen(os.dup(self._objects), "wb") as file:
            file.write(data)
        self._values.move()

    @property
    def path(self) -> str:
        """For the other processes: `PID:OBJECTS:VALUES`, while the host lives."""
        return f"{os.getpid()}:{self._objects}:{self._values.fd}"

    def release_values(self) -> None:
        """The session has them."""
        self._values.release()

    def close(self) -> None:
        self._values.release()
        self._closing()


class ForkedPayload:
    """The same for a manager that is a fork of the host: the objects themselves, which it and its runners have too."""

    objects: dict[str, dict[str, Any]] = {}

    def __init__(self, model: torch.nn.Module | None, dataset: Any, collate_fn: Any, options: dict[str, Any]) -> None:
        self._values = Values(model)
        self._values.move()
        self.path = f"forked:{id(self)}"
        self.objects[self.path] = {"model": model, "dataset": dataset, "collate_fn": collate_fn, "options": options}

    def release_values(self) -> None:
        """The session has them."""
        self._values.release()

    def close(self) -> None:
        self._values.release()
        self.objects.pop(self.path, None)


def _open(pid: str, fd: str, name: str) -> int | None:
    """None when the host has let go of it: the number may be another file's by now."""
    link = f"/proc/{pid}/fd/{fd}"
    try:
        if os.readlink(link) != f"/memfd:{name} (deleted)":
            return None
        return os.open(link, os.O_RDONLY)
    except OSError:
        return None


class Received:
    """Of the manager and the runners."""

    def __init__(self, path: str) -> None:
        self._forked = ForkedPayload.objects.get(path)
        if self._forked is not None:
            return
        if path.startswith("forked:"):
            raise UsageError(
                "the launcher of runners was lost, and with the start method 'fork' there is none in its place"
            )
        pid, objects, values = path.split(":")
        fd = _open(pid, objects, "accelmgr-objects")
        if fd is None:
            raise UsageError(f"the host, process {pid}, has ended or closed its manager")
        with os.fdopen(fd, "rb") as file:
            self._parts = pickle.load(file)
        self._values = (pid, values)
        sys.path[:] = self._parts["path"]

    @property
    def options(self) -> dict[str, Any]:
        options: dict[str, Any] = (self._forked or self._parts)["options"]
        return options

    def _tensors(self) -> list[torch.Tensor]:
        slots = self._parts["slots"]
        fd = _open(*self._values, "accelmgr-values")
        if fd is None:  # What a later runner needs of them is in the session.
            tensors = [torch.empty(slot.shape, dtype=slot.dtype) for slot in slots]
        else:
            tensors = _views(mmap.mmap(fd, 0, access=mmap.ACCESS_COPY), slots)
            os.close(fd)
        return [
            torch.nn.Parameter(tensor, requires_grad=slot.requires_grad) if slot.is_parameter else tensor
            for tensor, slot in zip(tensors, slots, strict=True)
        ]

    def load(self, what: str) -> Any:
        """`model`, `dataset` or `collate_fn`."""
        if self._forked is not None:
            if what == "model":  # Gradients of the host are no business of a replica's; they may be the master's.
                for parameter in self._forked[what].parameters():
                    parameter.grad = None
            return self._forked[what]
        tensors = self._tensors() if what == "model" else []
        return _Unpickler(io.BytesIO(self._parts[what]), tensors).load()
