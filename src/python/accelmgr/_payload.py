"""Sends a model and a dataset from the host to the manager and its runners.

They travel in two memfds of the host, which the other processes open through /proc.

- "objects": the pickled model (or the function that makes it), dataset and collate_fn. A number stands for each
  parameter and buffer of the model. It exists as long as runners may be started; each process reads the parts it needs.
- "values": the initial values of these buffers. Those of the parameters the host writes into the session itself, one
  after the other (_master.py), so that they exist once. Freed when the session has them.

A manager that is a fork of the host needs "values" alone, and only for parameters: each fork has its own memory for
buffers. The host's own tensors are moved there meanwhile.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import io
import itertools
import mmap
import os
import pickle
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, BinaryIO, ClassVar

import cloudpickle
import torch
from torch.nn.utils import parametrize
from torch.utils.hooks import RemovableHandle

from accelmgr._outline import HOOKS_OF_TENSORS, OWN_HOOKS, HooksOfTensors, registrar_of
from accelmgr._pickling import dump_dataset, load_dataset
from accelmgr._structure import named_leaves
from accelmgr.errors import DataError, ModelError, UsageError

ALIGNMENT = 64
MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Of Linux on x86; Python has the name from 3.13 on.

PickledDataset = tuple[bytes, list[memoryview]]
"""With memory of the dataset's tensors and arrays, which is copied once: all processes map the copy."""


@dataclasses.dataclass(frozen=True)
class Slot:
    """The place of a tensor of the model in the memfd of values."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    requires_grad: bool
    kind: type[torch.Tensor] | None  # Of a parameter; None: a buffer.

    @property
    def extent(self) -> int:
        """Number of elements from the first to the last one, gaps included."""
        if 0 in self.shape:
            return 0
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))

    def view(self, memory: Any) -> torch.Tensor:
        if self.extent == 0:
            return torch.empty(self.shape, dtype=self.dtype)
        flat = torch.frombuffer(memory, dtype=self.dtype, count=self.extent, offset=self.offset)
        return flat.as_strided(self.shape, self.strides)


def tensors_of(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Parameters (named_leaves()), then buffers, each tensor once under its first name."""
    for name, parameter in model.named_parameters():
        if isinstance(parameter, torch.nn.parameter.UninitializedParameter):
            raise ModelError(f"parameter '{name}' of the model is not initialized; call the model once first")
    return [*named_leaves(model), *model.named_buffers()]


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The address of the first byte, and the one behind the last byte."""
    begin = tensor.data_ptr()
    if tensor.numel() == 0:
        return begin, begin
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (last + 1) * tensor.element_size()


def overlapping(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """The indexes of the tensors, in groups that share memory. Most groups have one tensor."""
    groups: list[list[int]] = []
    reached = 0
    for (begin, end), index in sorted((_extent(tensor), index) for index, tensor in enumerate(tensors)):
        if begin == end:
            groups.insert(0, [index])
        elif begin < reached:
            groups[-1].append(index)
        else:
            groups.append([index])
        reached = max(reached, end)
    return groups


def slots_of(tensors: Sequence[tuple[str, torch.Tensor]]) -> tuple[list[Slot], int]:
    """The slot of each tensor, and the bytes of all slots.

    Tensors are laid out without gaps, but those that share memory keep their strides and go on sharing it.
    """
    slots: dict[int, Slot] = {}
    end = 0
    values = [tensor for _, tensor in tensors]
    for group in overlapping(values):
        first = min(values[index].data_ptr() for index in group)
        last = max(_extent(values[index])[1] for index in group)
        for index in group:
            name, tensor = tensors[index]
            alone = len(group) == 1
            kind = type(tensor) if isinstance(tensor, torch.nn.Parameter) else None
            strides = torch.empty(tensor.shape, device="meta").stride() if alone else tensor.stride()
            offset = end if alone else end + tensor.data_ptr() - first
            slots[index] = Slot(
                name, tensor.dtype, tuple(tensor.shape), tuple(strides), offset, tensor.requires_grad, kind
            )
        size = values[group[0]].nbytes if len(group) == 1 else last - first
        end += -(-size // ALIGNMENT) * ALIGNMENT
    return [slots[index] for index in range(len(tensors))], end


def copy_values(tensors: Sequence[torch.Tensor], slots: Sequence[Slot], memory: Any) -> list[torch.Tensor]:
    """Copies the tensors into `memory`. Returns views of it, one for each slot."""
    views = [slot.view(memory) for slot in slots]
    for group in overlapping(tensors):
        if len(group) == 1:
            views[group[0]].copy_(tensors[group[0]])
            continue
        begin = min(tensors[index].data_ptr() for index in group)
        size = max(_extent(tensors[index])[1] for index in group) - begin
        ctypes.memmove(min(views[index].data_ptr() for index in group), begin, size)
    return views


def private_copies(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies in the private memory of this process. Tensors that shared memory share it in the copy, too.

    The others may be resized, as any tensor of torch.
    """
    copies = [tensor.detach() for tensor in tensors]
    for group in overlapping(tensors):
        if len(group) == 1:
            copies[group[0]] = tensors[group[0]].detach().clone()
            continue
        members = [tensors[index] for index in group]
        slots, size = slots_of([("", tensor) for tensor in members])
        for index, copy in zip(group, copy_values(members, slots, bytearray(size)), strict=True):
            copies[index] = copy
    return copies


@dataclasses.dataclass(frozen=True)
class _Attached:
    """Attributes and hooks of a tensor of the model. A runner attaches them to its own tensor of the same number."""

    number: int
    attributes: dict[str, Any]
    hooks: dict[str, dict[int, Callable[..., Any]]]
    """By their kind, and by their numbers in the host."""

    @staticmethod
    def of(number: int, tensor: torch.Tensor) -> _Attached:
        hooks = {kind: dict(getattr(tensor, kind, None) or {}) for kind in HOOKS_OF_TENSORS}
        return _Attached(number, dict(tensor.__dict__), hooks)

    def __bool__(self) -> bool:
        return bool(self.attributes) or any(self.hooks.values())

    def attach(self, tensor: torch.Tensor) -> HooksOfTensors:
        tensor.__dict__.update(self.attributes)
        return {
            (self.number, kind, number): registrar_of(tensor, kind)(hook)
            for kind, hooks in self.hooks.items()
            for number, hook in hooks.items()
        }


def _parametrized(kind: type[torch.nn.Module], names: list[str]) -> torch.nn.Module:
    """An empty module of the class that torch.nn.utils.parametrize makes of `kind`."""
    module = kind.__new__(kind)
    parametrize._inject_new_class(module)
    for name in names:
        parametrize._inject_property(module, name)
    return module


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """Leaves the model's tensors out. A parametrized module, whose class is made anew for it, is made again there."""

    def __init__(self, file: BinaryIO, numbers: Mapping[int, int]) -> None:
        super().__init__(file)
        self._numbers = numbers

    def persistent_id(self, obj: Any) -> int | None:
        return self._numbers.get(id(obj)) if isinstance(obj, torch.Tensor) else None

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, torch.nn.Module) or not parametrize.is_parametrized(obj):
            return super().reducer_override(obj)
        kind = parametrize.type_before_parametrizations(obj)
        state_of = getattr(kind, "__getstate__", vars)  # object has it since Python 3.11.
        return _parametrized, (kind, list(obj.parametrizations)), state_of(obj)  # type: ignore[arg-type]


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: BinaryIO | mmap.mmap, tensors: list[torch.Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, pid: int) -> torch.Tensor:
        return self._tensors[pid]


def _culprit(value: Any, path: str, depth: int = 4) -> str:
    """Path and type of the innermost attribute of `value` that cannot be pickled."""
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


@contextlib.contextmanager
def _naming(what: str, value: Any) -> Iterator[None]:
    """Raises DataError, or ModelError for the model, that names the object that cannot be pickled."""
    try:
        yield
    except Exception as error:
        kind = ModelError if what == "model" else DataError
        other = "; pass a function that makes the model, as in Manager(make_model, ...)" if what == "model" else ""
        raise kind(
            f"{_culprit(value[0] if isinstance(value, tuple) else value, what)} cannot be pickled, as every start "
            f"method but 'fork' needs{other}: {type(error).__name__}: {error}"
        ) from error


def pickled(what: str, value: Any, numbers: Mapping[int, int] = MappingProxyType({})) -> bytes:
    file = io.BytesIO()
    with _naming(what, value):
        _Pickler(file, numbers).dump(value)
    return file.getvalue()


def pickled_dataset(dataset: Any) -> PickledDataset:
    with _naming("dataset", dataset):
        return dump_dataset(dataset)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _memfd(name: str, size: int) -> int:
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    os.ftruncate(fd, max(size, 1))
    return fd


class Values:
    """The tensors of a model. move() moves them into a memfd that all processes may map."""

    def __init__(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            if tensor.device.type != "cpu" or tensor.layout != torch.strided:
                raise ModelError(
                    f"'{name}' of the model is on {tensor.device}, {tensor.layout}; pass a dense model on the CPU: the "
                    "runners make their own replicas. Of a model on the meta device, pass a function that makes it, "
                    "and weights"
                )
        self.slots, self.bytes = slots_of(tensors)
        self.tensors = [tensor for _, tensor in tensors]
        self.fd = -1

    def move(self) -> None:
        self.fd = _memfd("accelmgr-values", self.bytes)
        self._memory = mmap.mmap(self.fd, max(self.bytes, 1))
        with torch.no_grad():
            views = copy_values(self.tensors, self.slots, self._memory)
            for tensor, view in zip(self.tensors, views, strict=True):
                tensor.data = view

    def release(self) -> None:
        """Gives tensors that still lie in the memfd private memory, and frees its pages, in forks too. Idempotent."""
        if self.fd < 0:
            return
        first = torch.frombuffer(self._memory, dtype=torch.uint8).data_ptr()
        here = [tensor for tensor in self.tensors if first <= tensor.data_ptr() < first + self.bytes]
        for tensor, copy in zip(here, private_copies(here), strict=True):
            tensor.data = copy
        self._memory.madvise(mmap.MADV_REMOVE)
        os.close(self.fd)
        self.fd, self.tensors = -1, []
        del self._memory


Factory = Callable[[], torch.nn.Module]


class Payload:
    """The host's side. `factory`: if it is passed, it is sent instead of the model."""

    def __init__(
        self,
        model: torch.nn.Module | None,
        factory: Factory | None,
        dataset: PickledDataset,
        collate_fn: Any,
        options: dict[str, Any],
    ) -> None:
        named = tensors_of(model) if model is not None else []
        parameters = Values(named_leaves(model) if model is not None else [])
        self._values = Values(named[len(parameters.tensors) :])
        behind = [
            dataclasses.replace(slot, offset=slot.offset + self._values.bytes, kind=slot.kind or torch.Tensor)
            for slot in parameters.slots
        ]
        tensors = [tensor for _, tensor in named]
        numbers = {id(tensor): number for number, tensor in enumerate(tensors)}
        attached = [_Attached.of(number, tensor) for number, tensor in enumerate(tensors)]
        attached = [found for found in attached if found]
        made = pickled("model", factory) if factory is not None else pickled("model", (model, attached), numbers)
        data, buffers = dataset
        sections = {"model": made, "dataset": data, "collate_fn": pickled("collate_fn", collate_fn)}
        offsets = list(itertools.accumulate((_aligned(buffer.nbytes) for buffer in buffers), initial=0))
        # cloudpickle, not pickle: it includes classes that are defined in __main__.
        header = cloudpickle.dumps(
            {
                "path": list(sys.path),
                "options": options,
                "slots": behind + self._values.slots,
                "factory": factory is not None,
                "sizes": {name: len(section) for name, section in sections.items()},
                "buffers": [(offset, buffer.nbytes) for offset, buffer in zip(offsets, buffers, strict=False)],
            }
        )
        parts = [len(header).to_bytes(8, "little"), header, *sections.values()]
        begin = _aligned(sum(map(len, parts)))
        self._objects = _memfd("accelmgr-objects", begin + offsets[-1])
        self._closing = weakref.finalize(self, os.close, self._objects)  # Also if the manager is never stopped.
        with os.fdopen(os.dup(self._objects), "wb") as file:
            file.writelines(parts)
            for offset, buffer in zip(offsets, buffers, strict=False):
                file.seek(begin + offset)
                file.write(buffer)
        self._values.move()

    @property
    def path(self) -> str:
        """The address for the other processes, `PID:OBJECTS:VALUES`. Valid while the host lives."""
        return f"{os.getpid()}:{self._objects}:{self._values.fd}"

    def release_values(self) -> None:
        """Frees the initial values. The session has them now."""
        self._values.release()

    def close(self) -> None:
        self._values.release()
        self._closing()


class ForkedPayload:
    """A Payload for a manager that is a fork of the host. The fork and its runners have the objects themselves."""

    objects: ClassVar[dict[str, dict[str, Any]]] = {}

    def __init__(self, model: torch.nn.Module | None, dataset: Any, collate_fn: Any, options: dict[str, Any]) -> None:
        if model is not None:
            tensors_of(model)  # Raises for parameters that cannot be used.
        self._values = Values(named_leaves(model) if model is not None else [])
        self._values.move()
        self.path = f"forked:{id(self)}"
        self.objects[self.path] = {"model": model, "dataset": dataset, "collate_fn": collate_fn, "options": options}

    def release_values(self) -> None:
        """Frees the initial values. The session has them now."""
        self._values.release()

    def close(self) -> None:
        self._values.release()
        self.objects.pop(self.path, None)


def _open(pid: str, fd: str, name: str) -> int | None:
    """Opens the memfd `name` of process `pid`. Returns None if that has closed it: `fd` may be another file by now."""
    link = f"/proc/{pid}/fd/{fd}"
    try:
        if os.readlink(link) != f"/memfd:{name} (deleted)":
            return None
        return os.open(link, os.O_RDONLY)
    except OSError:
        return None


class Received:
    """The side of the manager and the runners."""

    def __init__(self, path: str) -> None:
        self._forked = ForkedPayload.objects.get(path)
        self.hooks: HooksOfTensors = {}
        """Those of the model's tensors, from model() on."""
        if self._forked is not None:
            return
        if path.startswith("forked:"):
            raise UsageError(
                "the fork server of the runners was lost, and the start method 'fork' cannot start another one"
            )
        pid, objects, values = path.split(":")
        fd = _open(pid, objects, "accelmgr-objects")
        if fd is None:
            raise UsageError(f"the host, process {pid}, has ended or closed its manager")
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

    @property
    def has_values(self) -> bool:
        """Whether the parameters of model() have values. Otherwise the host writes them into the session."""
        return self._forked is not None

    def _initial(self) -> list[torch.Tensor] | None:
        """Private views of the initial values of buffers, which the caller may change; None if the session has them."""
        fd = _open(*self._values, "accelmgr-values")
        if fd is None:
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
        first = _aligned(self._begin + sum(self._parts["sizes"].values()))
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
        return _Unpickler(self._objects, tensors).load()

    def model(self) -> torch.nn.Module:
        """Makes the model. It has the initial values, unless these are in the session already."""
        RemovableHandle.next_id += OWN_HOOKS
        if self._forked is not None:
            model: torch.nn.Module = self._forked["model"]
            for parameter in model.parameters():  # The host's gradients are not those of a replica.
                parameter.grad = None
            buffers = list(model.buffers())  # Private ones, also if the host has them in shared memory.
            for buffer, copy in zip(buffers, private_copies(buffers), strict=True):
                buffer.data = copy
            return model
        if self._parts["factory"]:
            return self._made(self._unpickle("model", []))
        tensors = self._tensors()
        model, attached = self._unpickle("model", tensors)
        for found in attached:
            self.hooks |= found.attach(tensors[found.number])
        return model

    def _made(self, factory: Factory) -> torch.nn.Module:
        model = factory()
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
    if kind is torch.Tensor:  # Inside a quantized parameter.
        return tensor
    if kind is torch.nn.Parameter:
        return torch.nn.Parameter(tensor, requires_grad=requires_grad)
    made: torch.Tensor = torch.Tensor._make_subclass(kind, tensor, requires_grad)
    return made
