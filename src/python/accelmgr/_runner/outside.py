# Runs in: runners.
"""Finds tensors that a loss would train in plain PyTorch, but that are no parameters of the session: those of a
criterion in a global variable, a tensor `log_alpha`. Their gradients would stay in the runner, silently.

Such a tensor is a leaf of the loss's graph, requires a gradient, and was there before forward() began: it is reached
from the model or from what its code refers to, or forward() finds the same object in two micro-batches. These are no
mistakes:

- leaves that forward() makes (adversarial inputs, copies for inner loops): each micro-batch has others;
- leaves of which forward() takes a gradient itself (collocation points, gradient penalties);
- tensors of the batch.

A module in evaluation mode may be a teacher that nobody has frozen: its parameters are a warning, and no error.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from accelmgr._data.elements import tensors_in
from accelmgr._memory.tensors import dtype_name
from accelmgr._model.objective import Objective
from accelmgr._serialization.origin import is_of_library
from accelmgr.errors import ModelError

MOST = 20_000
"""How many objects are looked at before forward()."""
MOST_ENTRIES = 1000
"""How many entries of a container are looked at."""
OF_EVERY_MODULE = frozenset(vars(torch.nn.Module())) - {"_forward_hooks", "_forward_pre_hooks"}


@dataclasses.dataclass
class Leaf:
    tensor: torch.Tensor
    name: str
    """Empty if it is not known."""
    is_evaluated: bool = False
    """It belongs to a module in evaluation mode."""
    taken: bool = False
    """forward() has itself taken a gradient of the leaf."""

    def note(self, gradient: torch.Tensor) -> None:
        self.taken = True


class Reached:
    """Leaves that require a gradient and are reached from a model, and from what its code refers to."""

    def __init__(self, model: torch.nn.Module, own: set[int]) -> None:
        """own: id() of the session's tensors."""
        self._own = own
        self._seen: set[int] = set()
        self.leaves: dict[int, Leaf] = {}
        self._waiting: collections.deque[tuple[str, Any, bool]] = collections.deque()
        for name, module in model.named_modules():
            with contextlib.suppress(Exception):
                self._add_module(f"{name}." if name else "", module, False)
        if isinstance(model, Objective):
            self._waiting.append(("loss", vars(model)["_loss"], False))
        while self._waiting and len(self._seen) < MOST:
            with contextlib.suppress(Exception):  # Properties of another library's object may raise.
                self._look(*self._waiting.popleft())

    def _look(self, name: str, value: Any, is_evaluated: bool) -> None:
        if id(value) in self._seen or isinstance(value, (str, bytes, int, float, type(None))):
            return
        self._seen.add(id(value))
        if isinstance(value, torch.Tensor):
            if value.requires_grad and value.is_leaf and id(value) not in self._own:
                self.leaves[id(value)] = Leaf(value, name, is_evaluated)
        elif isinstance(value, torch.nn.Module):
            for path, module in value.named_modules():
                self._add_module(f"{name}.{path}." if path else f"{name}.", module, not module.training)
        elif isinstance(value, dict):
            entries = list(itertools.islice(value.items(), MOST_ENTRIES))
            self._waiting.extend((f"{name}[{key!r}]", entry, is_evaluated) for key, entry in entries)
        elif isinstance(value, (list, tuple, set, frozenset, collections.deque)):
            numbered = enumerate(list(itertools.islice(value, MOST_ENTRIES)))
            self._waiting.extend((f"{name}[{index}]", entry, is_evaluated) for index, entry in numbered)
        elif isinstance(value, MethodType):
            self._waiting += [(name, value.__self__, is_evaluated), (name, value.__func__, is_evaluated)]
        elif isinstance(value, functools.partial):
            parts = (value.func, value.args, value.keywords)
            self._waiting.extend((name, part, is_evaluated) for part in parts)
        elif isinstance(value, FunctionType):
            self._add_code(value)
        elif not isinstance(value, (type, ModuleType)) and not is_of_library(type(value).__module__):
            attributes = getattr(value, "__dict__", {})
            self._waiting.extend((f"{name}.{key}", entry, is_evaluated) for key, entry in list(attributes.items()))
            self._add_class(type(value))

    def _add_module(self, prefix: str, module: torch.nn.Module, is_evaluated: bool) -> None:
        self._seen.add(id(module))
        own = [*module._parameters.items(), *module._buffers.items()]
        other = [(key, value) for key, value in vars(module).items() if key not in OF_EVERY_MODULE]
        self._waiting.extend((prefix + key, value, is_evaluated) for key, value in own + other)
        self._add_class(type(module))

    def _add_class(self, kind: type) -> None:
        for base in kind.__mro__:
            if id(base) not in self._seen and not is_of_library(base.__module__):
                self._seen.add(id(base))
                for key, value in list(vars(base).items()):
                    found = getattr(value, "__func__", None) or getattr(value, "fget", None) or value
                    self._waiting.append((f"{base.__name__}.{key}", found, False))

    def _add_code(self, function: FunctionType) -> None:
        """What a function refers to: its closure, its defaults, and global variables, also those of other modules."""
        if is_of_library(function.__module__):
            return
        wrapped = getattr(function, "__wrapped__", None)
        self._waiting += [("", wrapped, False), ("", function.__defaults__ or (), False)]
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # It is empty.
                self._waiting.append((name, cell.cell_contents, False))
        names = _names_in(function.__code__)
        for name in names:
            value = function.__globals__.get(name)
            if not isinstance(value, ModuleType):
                self._waiting.append((name, value, False))
            elif not is_of_library(value.__name__):
                found = ((inner, vars(value).get(inner)) for inner in names)
                self._waiting.extend((f"{name}.{inner}", entry, False) for inner, entry in found if entry is not None)


def _names_in(code: Any) -> list[str]:
    """Names of global variables and attributes, also in functions inside."""
    inner = (constant for constant in code.co_consts if hasattr(constant, "co_names"))
    return [*code.co_names, *(name for each in inner for name in _names_in(each))]


def _hook(leaf: Leaf) -> RemovableHandle:
    return leaf.tensor.register_hook(leaf.note)  # type: ignore[no-untyped-call, no-any-return]


def leaves_of(loss: torch.Tensor) -> list[torch.Tensor]:
    """The leaves of its graph that require a gradient."""
    found: list[torch.Tensor] = []
    seen: set[Any] = set()
    waiting = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None:
            found.append(variable)
        waiting.extend(following for following, _ in node.next_functions)
    return found


class Outside:
    """Looks at the micro-batches 1, 2, 4, 8, ... of a runner, so that it costs next to nothing."""

    def __init__(self, model: torch.nn.Module, parameters: list[torch.Tensor]) -> None:
        self._model = model
        self._own = set(map(id, (*parameters, *model.parameters())))
        self._count = 0
        self._unknown: list[Leaf] = []
        """Leaves of the last graph that was looked at, which were reached from nowhere else."""
        self._told: set[int] = set()

    def changed(self) -> None:
        """The model has changed; the next micro-batch is looked at."""
        self._count = 0

    @contextlib.contextmanager
    def watched(self, inputs: Any, warn: Callable[[str], None]) -> Iterator[Callable[[torch.Tensor], None]]:
        """Call forward() in the block. It yields a function of the loss that raises ModelError for a leaf outside."""
        self._count += 1
        if self._count & (self._count - 1):
            yield lambda loss: None
            return
        reached = Reached(self._model, self._own).leaves | {id(leaf.tensor): leaf for leaf in self._unknown}
        of_batch = set(map(id, tensors_in(inputs)))
        handles = [_hook(leaf) for leaf in reached.values()]

        def look(loss: torch.Tensor) -> None:
            found = {id(leaf): leaf for leaf in leaves_of(loss)}
            found = {key: leaf for key, leaf in found.items() if key not in self._own and key not in of_batch}
            self._unknown = [Leaf(leaf, "") for key, leaf in found.items() if key not in reached]
            outside = [leaf for key, leaf in reached.items() if key in found and not leaf.taken]
            if sure := [leaf for leaf in outside if not leaf.is_evaluated]:
                raise ModelError(self._text(sure))
            if new := [leaf for leaf in outside if id(leaf.tensor) not in self._told]:
                self._told.update(id(leaf.tensor) for leaf in new)
                warn(self._text(new))

        try:
            yield look
        finally:
            for handle in handles:
                handle.remove()

    def _text(self, leaves: list[Leaf]) -> str:
        texts = [
            f"{each.name or 'a tensor'} ({dtype_name(each.tensor.dtype)} {list(each.tensor.shape)})" for each in leaves
        ]
        more = f" and {len(texts) - 3} more" if len(texts) > 3 else ""
        text = (
            f"the loss depends on {', '.join(texts[:3])}{more}, outside the model, which would get a gradient in plain "
            "PyTorch, and gets none from runners. To train it, pass it, or the module that has it: Manager(model, ..., "
            "extra=[criterion]) or extra={'log_alpha': log_alpha}. Otherwise call requires_grad_(False) of it"
        )
        if isinstance(self._model, Objective):
            text += (
                ". If `extra` has it: a global variable of an imported module is another object in runners, unless the "
                "start method is 'fork'; make it an attribute of the model"
            )
        return text
