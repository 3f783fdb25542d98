# Runs in: the host.
"""Sends a model and a dataset to the manager and its runners (_runner/received.py).

They travel in two memfds of the host, which the other processes open through /proc.

- "objects": the pickled model (or the function that makes it), dataset and collate_fn. A number stands for each
  parameter and buffer of the model. It exists as long as runners may be started; each process reads the parts it needs.
- "values": the initial values of these buffers. Freed when the session has them. The host itself writes the values of
  the parameters into the session, one after the other (master.py), so that they exist once.

A manager that is a fork of the host has these objects itself.
"""

from __future__ import annotations

import dataclasses
import io
import itertools
import mmap
import os
import sys
import weakref
from collections.abc import Callable, Collection, Mapping
from types import FunctionType, MappingProxyType
from typing import Any

import cloudpickle
import torch

from accelmgr._memory.memfd import make_memfd
from accelmgr._memory.placement import aligned, copy_values, drop_values, private_copies, slots_of
from accelmgr._model.session_tensors import named_leaves, tensors_of
from accelmgr._process.child import FORKED_OBJECTS
from accelmgr._serialization.model_pickling import Attached, ModelPickler, culprit
from accelmgr._serialization.origin import SCRIPT, is_of_library
from accelmgr._serialization.pickling import CannotPickle, Pickled, attempted, dump_dataset
from accelmgr.errors import DataError, ModelError

PickledDataset = tuple[bytes, list[memoryview]]
"""The bytes, and the memory of the dataset's tensors and arrays, which is copied once: all processes map the copy."""


def _named(what: str, value: Any, dump: Callable[[], Pickled]) -> Pickled:
    """Returns what `dump` returns. Raises DataError, or ModelError for the model, that names what cannot be pickled."""
    try:
        return attempted(dump)
    except CannotPickle as error:
        kind = ModelError if what == "model" else DataError
        other = "; pass a function that makes the model, as in Manager(make_model, ...)" if what == "model" else ""
        raise kind(
            f"{culprit(value[0] if isinstance(value, tuple) else value, what)} cannot be pickled, as every start "
            f"method but 'fork' needs{other}: {error}"
        ) from error


def pickled(what: str, value: Any, numbers: Mapping[int, int] = MappingProxyType({})) -> bytes:
    def dump() -> bytes:
        file = io.BytesIO()
        ModelPickler(file, numbers).dump(value)
        return file.getvalue()

    return _named(what, value, dump)


def pickled_dataset(dataset: Any, model: torch.nn.Module | None = None) -> PickledDataset:
    """Raises DataError for a dataset that has parameters of `model`."""
    trained = {id(leaf) for _, leaf in named_leaves(model)} if model is not None else set()
    return _named("dataset", dataset, lambda: dump_dataset(dataset, trained))


def check_sendable(model: torch.nn.Module, is_made_there: bool = False) -> None:
    """Raises ModelError for what another interpreter would silently compute differently.

    is_made_there: a function is sent that makes the model, and makes the script's replacements, too.
    """
    other = "is that of this process alone, but processes of every start method but 'fork' are other interpreters"
    for path, module in model.named_modules():
        if is_of_library(type(module).__module__):
            continue
        for name, value in vars(module).items():
            if name[0] != "_" and isinstance(value, (set, frozenset)) and _has_other_order(value):
                raise ModelError(
                    f"the order of the texts in the set '{path + '.' * bool(path)}{name}' of the model {other}: keep "
                    "them in a list or as the keys of a dict, or set PYTHONHASHSEED=0 in the environment of the script"
                )
    kinds = {kind for module in model.modules() for kind in type(module).__mro__ if kind.__module__ not in SCRIPT}
    owners: list[tuple[str, Mapping[str, Any]]] = [
        (f"{kind.__module__}.{kind.__qualname__}", vars(kind)) for kind in kinds
    ]
    names = {"torch", "torch.nn.functional"} | {kind.__module__ for kind in kinds}
    owners += [(name, vars(sys.modules[name])) for name in names if name in sys.modules]
    for owner, attributes in owners if not is_made_there else ():
        for name, value in attributes.items():
            if isinstance(value, FunctionType) and value.__globals__.get("__name__") in SCRIPT:
                raise ModelError(
                    f"{name}() of {owner}, which this script has replaced by {value.__qualname__}(), {other}: replace "
                    "it in a function that makes the model, Manager(make_model, ...), or pass start_method='fork'"
                )


def _has_other_order(values: Collection[Any]) -> bool:
    """Whether there are texts whose hashes, and so their order, are this process's alone."""
    if os.environ.get("PYTHONHASHSEED", "random") not in ("", "random") or len(values) < 2:
        return False
    return any(isinstance(value, (str, bytes)) for value in values)


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
        self.fd = make_memfd("accelmgr-values", self.bytes)
        self._memory = mmap.mmap(self.fd, max(self.bytes, 1))
        views = copy_values([tensor.detach() for tensor in self.tensors], self.slots, self._memory)
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


class SentModel:
    """`factory`: if it is passed, it is sent instead of the model."""

    def __init__(
        self,
        model: torch.nn.Module | None,
        factory: Factory | None,
        dataset: PickledDataset,
        collate_fn: Any,
        options: dict[str, Any],
    ) -> None:
        if model is not None:
            check_sendable(model, is_made_there=factory is not None)
        named = tensors_of(model) if model is not None else []
        parameters = Values(named_leaves(model) if model is not None else [])
        self._values = Values(named[len(parameters.tensors) :])
        behind = [
            dataclasses.replace(slot, offset=slot.offset + self._values.bytes, kind=slot.kind or torch.Tensor)
            for slot in parameters.slots
        ]
        tensors = [tensor for _, tensor in named]
        numbers = {id(tensor): number for number, tensor in enumerate(tensors)}
        attached = [Attached.of(number, tensor) for number, tensor in enumerate(tensors)]
        attached = [found for found in attached if found]
        made = pickled("model", factory) if factory is not None else pickled("model", (model, attached), numbers)
        data, buffers = dataset
        sections = {"model": made, "dataset": data, "collate_fn": pickled("collate_fn", collate_fn)}
        offsets = list(itertools.accumulate((aligned(buffer.nbytes) for buffer in buffers), initial=0))
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
        begin = aligned(sum(map(len, parts)))
        self._objects = make_memfd("accelmgr-objects", begin + offsets[-1])
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


class ForkedModel:
    """A SentModel for a manager that is a fork of the host. The fork and its runners have the objects themselves.

    The host writes the parameters into the session. Until then forks would keep a copy of their pages.
    """

    def __init__(self, model: torch.nn.Module | None, dataset: Any, collate_fn: Any, options: dict[str, Any]) -> None:
        if model is not None:
            tensors_of(model)  # Raises for parameters that cannot be used.
        self._leaves = [leaf for _, leaf in named_leaves(model)] if model is not None else []
        self.options = options
        self.path = f"forked:{id(self)}"
        FORKED_OBJECTS[self.path] = {
            "model": model,
            "dataset": dataset,
            "collate_fn": collate_fn,
            "options": options,
            "forget_values": self._forget_values,
        }

    def _forget_values(self) -> None:
        drop_values(self._leaves)
        for leaf in self._leaves:
            leaf.grad = None

    def release_values(self) -> None:
        """Called when the session has the values."""
        self._leaves = []

    def close(self) -> None:
        FORKED_OBJECTS.pop(self.path, None)
