# Runs in: the host.
"""Notes all that is reached from a model, a dataset and the script's functions: what a watch compares.

Attributes, containers, hooks, closures, and the global variables that functions of the script name. Modules of its
project are as the script is; the content of libraries is theirs.
"""

from __future__ import annotations

import array
import bisect
import builtins
import collections
import contextvars
import dis
import functools
import itertools
import logging
import operator
import random
import sys
import threading
import weakref
from collections.abc import Callable
from io import IOBase
from types import BuiltinFunctionType, CodeType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any

import torch

from accelmgr import _native
from accelmgr._memory.files import are_of_files
from accelmgr._memory.tensors import is_expanded, storage_of
from accelmgr._model.session_tensors import named_leaves
from accelmgr._serialization.origin import is_of_project, is_of_script

OF_TENSORS = ("_backward_hooks", "_post_accumulate_grad_hooks")
MOST_ENTRIES = 1000
"""The most entries of a dataset's container whose content is looked at."""
MOST_COMPARED = 100_000
"""In a longer list or dict, as far as this, other entries are found; beyond it the length alone is compared."""
WHOLE_BYTES = 1 << 20
"""The content of tensors and arrays is compared whole as far as this in all, beginning with the smallest."""
PIECES = 1 << 10
"""Of all larger ones together so many pieces of 64 bytes are compared."""

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_LEAVES = (
    *PLAIN,
    BuiltinFunctionType,
    CodeType,
    GeneratorType,
    IOBase,
    ModuleType,
    logging.Logger,
    random.Random,
    range,
    slice,
    torch.Generator,
    torch.optim.Optimizer,
    torch.optim.lr_scheduler.LRScheduler,
    weakref.ref,
)
"""Types whose content is not looked at: it cannot change, cannot be seen, or is the host's alone."""
_FOREIGN = frozenset(
    "accelmgr multiprocessing threading _thread asyncio concurrent _weakref logging tqdm tensorboard tensorboardX "
    "wandb mlflow".split()
)
"""Packages whose objects change by themselves, or that watch a training and change no number of it."""


def holds_values(value: Any) -> bool:
    """Whether it is a list or a dict of numbers and texts, of which runners can be told in a record."""
    if type(value) is dict:
        return all(map(_is_value, value)) and all(map(_is_value, value.values()))
    return type(value) is list and all(map(_is_value, value))


def _is_value(value: Any) -> bool:
    return isinstance(value, PLAIN)


def is_numpy(value: Any, kind: str) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, getattr(numpy, kind))


def _is_foreign(value: Any) -> bool:
    """Whether a class or a function belongs to a package whose state is its own."""
    module = getattr(value, "__module__", None) or ""
    return module.partition(".")[0] in _FOREIGN or module.startswith(("torch._", "torch.utils.tensorboard"))


@functools.lru_cache(maxsize=4096)
def _globals_of(code: CodeType) -> tuple[str, ...]:
    """The global variables that the code names, with those of functions inside."""
    names = {entry.argval for entry in dis.get_instructions(code) if entry.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names.update(_globals_of(constant))
    return tuple(sorted(names))


@functools.lru_cache(maxsize=4096)
def _names_in(code: CodeType) -> frozenset[str]:
    """All names in the code but those of local variables, with those of functions inside."""
    inner = (_names_in(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return frozenset(code.co_names).union(*inner)


def _slots_of(value: Any) -> list[str]:
    names: list[str] = []
    for kind in type(value).__mro__:
        own = vars(kind).get("__slots__", ())
        names += [own] if isinstance(own, str) else own
    return [name for name in names if name[:2] != "__" and hasattr(value, name)]


def is_seen_by_all(tensor: torch.Tensor) -> bool:
    """Whether all processes have this memory."""
    return tensor.layout is torch.strided and tensor.is_shared()  # type: ignore[no-untyped-call]


def has_content(tensor: torch.Tensor) -> bool:
    """Whether its content can be compared: writes by `.data` or NumPy leave no other trace."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
        return False
    return tensor.device.type == "cpu" and not tensor.is_nested and not is_seen_by_all(tensor)


def _address_of(value: Any) -> int:
    """The first byte of a tensor, of a NumPy array, or of another object with a buffer, which has no file."""
    if isinstance(value, torch.Tensor):
        return value.data_ptr()
    return int(value.__array_interface__["data"][0]) if is_numpy(value, "ndarray") else 0


def _is_in(storages: set[int], tensor: torch.Tensor) -> bool:
    return bool(storages) and tensor.layout == torch.strided and storage_of(tensor) in storages


class Reached:
    """Entries of a snapshot, and what each of them is."""

    def __init__(self, model: torch.nn.Module | None, others: dict[str, Any], forks: bool) -> None:
        """others: dataset, collate_fn and the like, by name. forks: see Watch."""
        self.snapshot = _native.Snapshot()
        self.names: list[str] = []
        """The name of each entry of the snapshot, for people."""
        self.modules: dict[int, tuple[str, torch.nn.Module]] = {}
        """Entries that are the attributes of a module of the model: the module's path, and the module."""
        self.containers: dict[int, tuple[str, str, Any]] = {}
        """Entries that are containers of values: path of the module, name of its attribute, and the container."""
        self.tensors: dict[int, torch.Tensor] = {}
        """Entries that are versions or contents of tensors."""
        self.attributes: list[tuple[str, str, torch.Tensor]] = []
        """Tensors that are attributes of modules, for which there is no entry: path of the module, name, tensor."""
        self.of_runners: list[torch.Tensor] = []
        """Tensors that are reached from the model, and not from the dataset: of these, later forks can be told."""
        self.known: set[int] = set()
        """Parameters and buffers of the model, by id(): of their values runners hear in another way."""
        self._forks = forks
        self._contents: list[tuple[str, Any, int]] = []
        """Tensors and arrays that the walk has found: name, object, size in bytes."""
        self._seen: set[int] = set()
        self._named: set[str] = set()
        """Names in modules, `config.scale`, that were visited."""
        self._followed: set[int] = set()
        """The memory of parameters; see aliases.py."""
        self._paths: dict[int, str] = {}
        self._in_data = True
        if model is not None:
            leaves = [leaf for _, leaf in named_leaves(model)]  # Also what is inside quantized parameters.
            self.known = set(map(id, (*model.parameters(), *leaves, *model.buffers())))
            self._followed = set(map(storage_of, leaves)) if forks else set()
            self._paths = {id(module): path for path, module in model.named_modules()}
        for name, value in others.items():
            self._walk(name, value)
        self._in_data = False
        if model is not None:
            self._walk("model", model)
            for name in vars(torch.nn.modules.module):
                if name.startswith("_global_") and "hooks" in name:
                    self._walk(name, getattr(torch.nn.modules.module, name))
        self._add_contents()
        self._seen = set()

    def _add_contents(self) -> None:
        found = sorted(self._contents, key=operator.itemgetter(2))
        sums = list(itertools.accumulate(size for _, _, size in found))
        whole = bisect.bisect_right(sums, WHOLE_BYTES)
        for name, value, size in found[:whole]:
            self._content(name, value, size // 64 + 2)
        if large := found[whole:]:
            of_files = are_of_files(_address_of(value) for _, value, _ in large)
            large = [each for each, of_file in zip(large, of_files, strict=True) if not of_file]
        for name, value, _ in large:
            self._content(name, value, max(PIECES // len(large), 2))
        self._contents = []

    def _content(self, name: str, value: Any, pieces: int) -> None:
        index = self._entry(name, self.snapshot.add_content(value, pieces))
        if isinstance(value, torch.Tensor):
            self.tensors[index] = value

    def _entry(self, what: str, index: int) -> int:
        assert index == len(self.names)
        self.names.append(what)
        return index

    def _walk(self, path: str, value: Any) -> None:
        waiting = [(path, value)]
        while waiting:
            path, value = waiting.pop()
            if isinstance(value, _LEAVES) or id(value) in self._seen:
                continue
            self._seen.add(id(value))
            waiting += self._visit(path, value)

    def _visit(self, path: str, value: Any) -> list[tuple[str, Any]]:
        """Notes what `value` holds. Returns the objects to visit, with their paths."""
        if isinstance(value, torch.Tensor):
            return self._visit_tensor(path, value)
        if isinstance(value, torch.nn.Module):
            return self._visit_module(path, value)
        for kind, visit in _VISITS.items():
            if isinstance(value, kind):
                return visit(self, path, value)
        if is_numpy(value, "ndarray"):
            return self._visit_array(path, value)
        if _is_foreign(type(value)):
            return []
        return self._visit_object(path, value)

    def _visit_tensor(self, path: str, value: torch.Tensor) -> list[tuple[str, Any]]:
        is_followed = id(value) in self.known or (type(value) is torch.Tensor and _is_in(self._followed, value))
        if not is_followed and not is_seen_by_all(value):
            if not self._in_data and has_content(value) and not (value.is_inference() or is_expanded(value)):
                self.of_runners.append(value)
            if not value.is_inference():
                self.tensors[self._entry(path, self.snapshot.add_attribute(value, "_version"))] = value
            if has_content(value):
                self._contents.append((path, value, value.nbytes))
        found = []
        for name in OF_TENSORS if value.requires_grad or id(value) in self.known else ():
            self._entry(f"a hook of {path}", self.snapshot.add_attribute(value, name))
            found.append((f"a hook of {path}", getattr(value, name)))
        attributes = vars(value)
        if attributes or id(value) in self.known:
            found.append((path, attributes))
        return found

    def _visit_module(self, path: str, value: torch.nn.Module) -> list[tuple[str, Any]]:
        attributes = vars(value)
        index = self._entry(path, self.snapshot.add_items(attributes))
        self._entry(f"the class of {path}", self.snapshot.add_attribute(value, "__class__"))
        found: list[tuple[str, Any]] = self._visit_class(path, type(value))
        if (own := self._paths.get(id(value))) is not None:
            self.modules[index] = own, value
        for name, part in attributes.items():
            if name in ("_parameters", "_buffers"):  # Runners are told of their values in another way.
                found += [(f"{path}.{key}", tensor) for key, tensor in part.items() if tensor is not None]
                self._entry(f"a buffer of {path}", self.snapshot.add_result(part, "__len__"))
            elif name == "_non_persistent_buffers_set":
                continue
            elif name == "_modules":
                self._entry(f"a module of {path}", self.snapshot.add_items(part))
                found += [(f"{path}.{key}" if key else path, module) for key, module in part.items()]
            elif isinstance(part, torch.Tensor) and own is not None and type(part) is torch.Tensor:
                self.attributes.append((own, name, part))
            elif own is not None and id(part) not in self._seen and holds_values(part):
                self._seen.add(id(part))
                self.containers[self._entry(f"{path}.{name}", self.snapshot.add_items(part))] = own, name, part
            else:
                what = f"a hook of {path}" if "hooks" in name and name[0] == "_" else f"{path}.{name}"
                found.append((what, part))
        return found

    def _visit_class(self, path: str, kind: type) -> list[tuple[str, Any]]:
        """Visits a class of the script in full, and of a library's class forward() alone."""
        if id(kind) in self._seen:
            return []
        self._seen.add(id(kind))
        if not self._is_of_script(kind):
            if issubclass(kind, torch.nn.Module):
                self._entry(f"{kind.__qualname__}.forward", self.snapshot.add_attribute(kind, "forward"))
            return []
        name = kind.__qualname__
        self._entry(f"class {name}", self.snapshot.add_result(_Attributes(kind), "items"))
        found = [(f"{name}.{key}", value) for key, value in vars(kind).items()]
        return found + [pair for base in kind.__bases__ for pair in self._visit_class(path, base)]

    def _visit_function(self, path: str, value: FunctionType) -> list[tuple[str, Any]]:
        if _is_foreign(value) or (value.__module__ or "").startswith("torch."):
            return []
        own = f"{value.__qualname__}()"
        found: list[tuple[str, Any]] = []
        for number, cell in enumerate(value.__closure__ or ()):
            if id(cell) not in self._seen:
                self._seen.add(id(cell))
                name = f"'{value.__code__.co_freevars[number]}' of {own}"
                self._entry(name, self.snapshot.add_attribute(cell, "cell_contents"))
                found.append((name, getattr(cell, "cell_contents", None)))
        for name in ("__code__", "__defaults__", "__kwdefaults__"):
            self._entry(own, self.snapshot.add_attribute(value, name))
        found += [(own, value.__defaults__), (own, value.__kwdefaults__), (own, vars(value))]
        if self._is_of_script(value):
            known = [
                name for name in _globals_of(value.__code__) if name in value.__globals__ or not hasattr(builtins, name)
            ]
            for name in known:
                self._entry(f"global '{name}' of {own}", self.snapshot.add_keys(value.__globals__, [name]))
            found += [(name, value.__globals__[name]) for name in known if name in value.__globals__]
            if self._forks:
                names = _names_in(value.__code__)
                imported = (sys.modules.get(name) for name in names)  # By the function itself.
                for module in (*imported, *(part for _, part in found)):
                    found += self._visit_names(module, names)
        return found

    def _visit_names(self, module: object, names: frozenset[str]) -> list[tuple[str, Any]]:
        """Visits what `module`, if it is one of the script's project, has of these names."""
        found: list[tuple[str, Any]] = []
        if not isinstance(module, ModuleType) or not is_of_project(module.__name__):
            return found
        for name in sorted(names & vars(module).keys()):
            path, part = f"{module.__name__}.{name}", vars(module)[name]
            if path in self._named:
                continue
            self._named.add(path)
            self._entry(f"'{path}'", self.snapshot.add_keys(vars(module), [name]))
            found += self._visit_names(part, names) if isinstance(part, ModuleType) else [(path, part)]
        return found

    def _is_of_script(self, value: Any) -> bool:
        """Whether a function or a class is defined in the script itself or, for forks, in a module of its project."""
        name = getattr(value, "__module__", None)
        return is_of_script(name) or (self._forks and is_of_project(name))

    def _visit_long(self, path: str, value: Any) -> bool:
        """Notes a container of a dataset with very many entries, without the content of these."""
        if not self._is_long(value):
            return False
        self._seen.discard(id(value))  # If the model has it, too, its entries are visited.
        has_items = isinstance(value, (dict, list)) and len(value) <= MOST_COMPARED
        self._entry(path, self.snapshot.add_items(value) if has_items else self.snapshot.add_result(value, "__len__"))
        if isinstance(value, collections.deque):  # One that is full keeps its length.
            for end in ("first", "last"):
                self._entry(path, self.snapshot.add_attribute(_Ends(value), end))
        return True

    def _visit_dict(self, path: str, value: dict[Any, Any]) -> list[tuple[str, Any]]:
        if self._visit_long(path, value):
            return []
        self._entry(path, self.snapshot.add_items(value))
        return [(f"{path}[{key!r:.40}]", part) for key, part in dict.items(value)] + self._own_attributes(path, value)

    def _visit_list(self, path: str, value: list[Any]) -> list[tuple[str, Any]]:
        if self._visit_long(path, value):
            return []
        self._entry(path, self.snapshot.add_items(value))
        return [(f"{path}[{index}]", part) for index, part in enumerate(list.__iter__(value))] + self._own_attributes(
            path, value
        )

    def _own_attributes(self, path: str, value: Any) -> list[tuple[str, Any]]:
        attributes = getattr(value, "__dict__", None)
        return [(path, attributes)] if isinstance(attributes, dict) else []

    def _visit_copied(self, path: str, value: Any) -> list[tuple[str, Any]]:
        if self._visit_long(path, value):
            return []
        self._entry(path, self.snapshot.add_equal(value, "copy"))
        return [(path, part) for part in value]

    def _visit_parts(self, path: str, value: Any) -> list[tuple[str, Any]]:
        return [] if self._is_long(value) else [(path, part) for part in value]

    def _is_long(self, value: Any) -> bool:
        return self._in_data and len(value) > MOST_ENTRIES

    def _visit_bytes(self, path: str, value: Any) -> list[tuple[str, Any]]:
        self._contents.append((path, value, memoryview(value).nbytes))
        return []

    def _visit_array(self, path: str, value: Any) -> list[tuple[str, Any]]:
        try:
            is_plain = not value.dtype.hasobject and memoryview(value).contiguous
        except ValueError:  # Dates.
            is_plain = False
        if is_plain:
            self._contents.append((path, value, value.nbytes))
        elif value.nbytes <= WHOLE_BYTES and not value.dtype.hasobject:
            self._entry(path, self.snapshot.add_result(value, "tobytes"))
        return []

    def _visit_variable(self, path: str, value: contextvars.ContextVar[Any]) -> list[tuple[str, Any]]:
        self._entry(path, self.snapshot.add_attribute(_Variable(value), "value"))
        return [(path, value.get(None))]

    def _visit_local(self, path: str, value: threading.local) -> list[tuple[str, Any]]:
        """Visits the attributes of this thread, which forks have (thread_locals.py)."""
        is_visited = type(value) is threading.local or not _is_foreign(type(value))
        return self._own_attributes(path, value) if self._forks and is_visited else []

    def _visit_method(self, path: str, value: MethodType) -> list[tuple[str, Any]]:
        return [(path, value.__self__), (path, value.__func__)]

    def _visit_partial(self, path: str, value: functools.partial[Any]) -> list[tuple[str, Any]]:
        return [(path, value.func), (path, value.args), (path, value.keywords)]

    def _visit_type(self, path: str, value: type) -> list[tuple[str, Any]]:
        self._seen.discard(id(value))  # _visit_class() looks itself.
        return self._visit_class(path, value)

    def _visit_descriptor(self, path: str, value: Any) -> list[tuple[str, Any]]:
        return [(path, getattr(value, name, None)) for name in ("__func__", "fget", "fset", "__wrapped__")]

    def _visit_object(self, path: str, value: Any) -> list[tuple[str, Any]]:
        found = self._visit_class(path, type(value))
        found += self._own_attributes(path, value)
        for name in _slots_of(value):
            self._entry(f"{path}.{name}", self.snapshot.add_attribute(value, name))
            found.append((f"{path}.{name}", getattr(value, name)))
        return found


class _Attributes:
    """The attributes of a class, in a form that a Snapshot compares. getattr() would bind methods anew each time."""

    def __init__(self, kind: type) -> None:
        self._kind = kind

    def items(self) -> list[tuple[str, Any]]:
        return list(vars(self._kind).items())


class _Ends:
    """The ends of a deque, as attributes."""

    def __init__(self, entries: collections.deque[Any]) -> None:
        self._entries = entries

    @property
    def first(self) -> Any:
        return self._entries[0] if self._entries else None

    @property
    def last(self) -> Any:
        return self._entries[-1] if self._entries else None


class _Variable:
    """The value of a context variable as an attribute, which may be missing."""

    def __init__(self, variable: contextvars.ContextVar[Any]) -> None:
        self._variable = variable

    def __getattr__(self, name: str) -> Any:
        try:
            return self._variable.get()
        except LookupError:
            raise AttributeError(name) from None


_VISITS: dict[Any, Callable[[Reached, str, Any], list[tuple[str, Any]]]] = {
    dict: Reached._visit_dict,
    list: Reached._visit_list,
    (set, collections.deque): Reached._visit_copied,
    (tuple, frozenset): Reached._visit_parts,
    (bytearray, array.array): Reached._visit_bytes,
    contextvars.ContextVar: Reached._visit_variable,
    FunctionType: Reached._visit_function,
    MethodType: Reached._visit_method,
    functools.partial: Reached._visit_partial,
    type: Reached._visit_type,
    (staticmethod, classmethod, property, functools._lru_cache_wrapper): Reached._visit_descriptor,
    threading.local: Reached._visit_local,
}
