# Runs in: the host, which sends; runners, which follow.
"""What a model is beside its parameters, buffers and modes: attributes, hooks, modules without tensors.

The host compares its model before each step with what runners have. What has changed is sent to them; what cannot be
sent raises, and names it. Lists, dicts, sets, objects, tensors and NumPy arrays are seen when they change in place; but
not the content of an array of more than MOST_BYTES, and of a container with more than MOST_COMPARED entries only the
length.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import operator
import sys
from collections.abc import Callable, Iterator
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch.nn.modules import module as torch_module
from torch.utils.hooks import RemovableHandle

from accelmgr._common.journal import Journal
from accelmgr._common.pickling import is_picklable
from accelmgr.errors import ModelError

HOOKS = (
    "_backward_pre_hooks",
    "_backward_hooks",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)
HOOKS_OF_TENSORS = ("_backward_hooks", "_post_accumulate_grad_hooks")
HOOKS_OF_ALL = tuple(name for name in vars(torch_module) if name.startswith("_global_") and "hooks" in name)
HooksOfTensors = dict[tuple[int, str, int], RemovableHandle]
"""Handles by number of the tensor, kind of the hook, and its number in the host."""
NOT_SENT = frozenset(vars(torch.nn.Module())) - {"_is_full_backward_hook"} | {"_compiled_call_impl"}
"""Attributes of a module that others follow, or that change no number."""

DEPTH = 5
MOST_CONTAINERS = 2000  # That are looked at.
MOST_ENTRIES = 1000  # Of a container whose entries are looked into.
MOST_COMPARED = 20_000  # Of one whose entries are compared.
MOST_BYTES = 1 << 16
CHANGES = "changes"
"""The kind of an entry of the journal: a list of changes, made at once."""
OWN_HOOKS = 1 << 40
"""From here on a runner numbers hooks of its own, so that they are not taken for those of the host."""


class Of(NamedTuple):
    """A step to an attribute of an object. Other steps are keys and indexes."""

    name: str


Change = tuple[str, tuple[Any, ...]]
"""Its kind, and what it takes to make it."""
Place = tuple[str, str, tuple[Any, ...]]
"""Path of a module, its attribute, and the steps from there."""


def registrar_of(tensor: torch.Tensor, kind: str) -> Callable[[Callable[..., Any]], RemovableHandle]:
    """The method that adds a hook of that kind of HOOKS_OF_TENSORS."""
    return tensor.register_hook if kind == "_backward_hooks" else tensor.register_post_accumulate_grad_hook


def _is_object(value: Any) -> bool:
    kinds = (torch.nn.Module, torch.Tensor, type, FunctionType, MethodType, BuiltinFunctionType, ModuleType)
    return hasattr(value, "__dict__") and not isinstance(value, kinds)


def _slots_of(value: Any) -> dict[str, Any]:
    """The attributes of an object that lie in `__slots__`."""
    names: list[str] = []
    for kind in type(value).__mro__:
        own = vars(kind).get("__slots__", ())
        names += [own] if isinstance(own, str) else own
    return {name: getattr(value, name) for name in names if name[:2] != "__" and hasattr(value, name)}


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray) and not value.dtype.hasobject


def _parts(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, dict):
        yield from value.items()
    elif isinstance(value, (list, tuple, collections.deque)):
        yield from enumerate(value)
    if _is_object(value):
        yield from ((Of(name), part) for name, part in vars(value).items())
    if not isinstance(value, (torch.nn.Module, torch.Tensor, type)):
        yield from ((Of(name), part) for name, part in _slots_of(value).items())


def at(value: Any, way: tuple[Any, ...]) -> Any:
    for step in way:
        value = getattr(value, step.name) if isinstance(step, Of) else value[step]
    return value


@dataclasses.dataclass
class _Seen:
    """Things of one kind that are reached from attributes, and what was read of each."""

    change: str
    what: str
    read: Callable[[Any], Any] | None
    """None: the thing itself is compared, with a copy."""
    sent: Callable[[Any], Any]
    """What runners are told of a thing that has changed."""
    places: list[Place] = dataclasses.field(default_factory=list)
    things: list[Any] = dataclasses.field(default_factory=list)
    before: list[Any] = dataclasses.field(default_factory=list)

    def add(self, place: Place, thing: Any) -> None:
        self.places.append(place)
        self.things.append(thing)
        self.before.append((self.read or copy.copy)(thing))

    def _now(self) -> list[Any]:
        return self.things if self.read is None else list(map(self.read, self.things))

    def same(self) -> bool:
        return self._now() == self.before

    def changes(self, left_out: set[tuple[str, str]]) -> Iterator[tuple[str, Change]]:
        for place, thing, now, before in zip(self.places, self.things, self._now(), self.before, strict=True):
            if place[:2] not in left_out and not _equal(now, before):
                what = f"{self.what} '{place[0]}.{place[1]}' of the model"
                yield what, (self.change, (place, self.sent(thing)))


class _Inside:
    """The containers and tensors that are reached from attributes, as they were."""

    def __init__(self) -> None:
        self._containers = _Seen("inside", "what is in", None, _items)
        self._long = _Seen("inside", "what is in", len, _items)
        self._slotted = _Seen("slots", "what is in", _slots_of, _slots_of)
        self._arrays = _Seen("array", "the array", operator.methodcaller("tobytes"), operator.methodcaller("copy"))
        self._tensors = _Seen("tensor", "the tensor", _version_of, lambda tensor: tensor.detach().clone())
        self.kinds = (self._containers, self._long, self._slotted, self._arrays, self._tensors)
        self._seen: set[int] = set()

    def add(self, place: Place, value: Any, known: dict[int, Any]) -> None:
        if id(value) in self._seen or len(self._containers.things) > MOST_CONTAINERS:
            return
        if isinstance(value, torch.Tensor):
            if id(value) not in known and not isinstance(value, torch.nn.Parameter):
                self._seen.add(id(value))
                self._tensors.add(place, value)
            return
        if _is_array(value):
            if value.nbytes <= MOST_BYTES:
                self._seen.add(id(value))
                self._arrays.add(place, value)
            return
        slots = {} if isinstance(value, (torch.nn.Module, type)) else _slots_of(value)
        if slots:
            self._slotted.add(place, value)
        is_container = isinstance(value, (list, dict, set, collections.deque))
        if is_container or _is_object(value):
            container = value if is_container else vars(value)
            (self._long if len(container) > MOST_COMPARED else self._containers).add(place, container)
        elif not isinstance(value, tuple) and not slots:
            return
        self._seen.add(id(value))
        if len(place[2]) < DEPTH and not (hasattr(value, "__len__") and len(value) > MOST_ENTRIES):
            for step, part in list(_parts(value)):
                self.add((place[0], place[1], (*place[2], step)), part, known)


def _version_of(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _equal(one: Any, other: Any) -> bool:
    if one is other:
        return True
    try:
        return type(one) is type(other) and bool(one == other)
    except Exception:  # A tensor or an array.
        return False


def _items(container: Any) -> Any:
    return dict(container) if isinstance(container, dict) else list(container)


def put(container: Any, items: Any) -> None:
    """Makes these the items of a list, dict, set, deque, or the attributes of an object."""
    target = vars(container) if _is_object(container) and not isinstance(container, (list, dict, set)) else container
    target.clear()
    (target.extend if isinstance(target, (list, collections.deque)) else target.update)(items)


class Outline:
    """The side of the host."""

    def __init__(self, model: torch.nn.Module, tensors: list[torch.Tensor]) -> None:
        """tensors: those of the model, in the order in which runners have them, too."""
        self._model = model
        self._tensors = tensors
        self._numbers = {id(tensor): number for number, tensor in enumerate(tensors)}
        self._known: dict[int, Any] = {}
        self._hooks: dict[tuple[Any, str], dict[int, Any]] = {}
        self.note()
        for name in HOOKS_OF_ALL:  # They did not come with the model.
            if self._hooks.pop((None, name), None):
                self._hook_number = -1

    def note(self) -> None:
        """Records that runners have the present state."""
        modules = dict(self._model.named_modules())
        self._known = {id(module): path for path, module in modules.items()} | self._numbers
        self._modules = modules
        self._types = list(map(type, modules.values()))
        self._forwards = {kind: getattr(kind, "forward", None) for kind in self._types}
        self._children = {path: dict(module._modules) for path, module in modules.items()}
        self._dictionaries = [vars(module) for module in modules.values()]
        self._lengths = list(map(len, self._dictionaries))
        self._attributes = {
            path: {key: value for key, value in vars(module).items() if key not in NOT_SENT}
            for path, module in modules.items()
        }
        pairs = [
            (operator.itemgetter(*found), entries)
            for found, entries in zip(self._attributes.values(), self._dictionaries, strict=True)
            if found
        ]
        self._pairs = pairs
        self._values = [get(owner) for get, owner in pairs]
        self._inside = _Inside()
        for path, found in self._attributes.items():
            for key, value in found.items():
                self._inside.add((path, key, ()), value, self._known)
        self._buffers = [module._buffers for module in modules.values()]
        self._buffer_count = sum(map(len, self._buffers))
        self._buffer_keys = {path: set(module._buffers) for path, module in modules.items() if module._buffers}
        self._note_hooks()

    def _note_hooks(self) -> None:
        self._hook_number = RemovableHandle.next_id
        self._hooks = {place: dict(hooks) for place, hooks in self._all_hooks() if hooks}
        self._hook_owners = [hooks for _, hooks in self._all_hooks() if hooks]
        self._hook_counts = list(map(len, self._hook_owners))

    def _all_hooks(self) -> Iterator[tuple[tuple[Any, str], dict[int, Any]]]:
        for name in HOOKS_OF_ALL:
            yield (None, name), getattr(torch_module, name)
        for path, module in self._modules.items():
            for name in HOOKS:
                yield (path, name), vars(module).get(name) or {}
        for number, tensor in enumerate(self._tensors):
            for name in HOOKS_OF_TENSORS:
                yield (number, name), getattr(tensor, name, None) or {}

    def _is_same(self) -> bool:
        try:
            return (
                list(map(len, self._dictionaries)) == self._lengths
                and [get(owner) for get, owner in self._pairs] == self._values
                and all(seen.same() for seen in self._inside.kinds)
                and sum(map(len, self._buffers)) == self._buffer_count
                and list(map(type, self._modules.values())) == self._types
                and RemovableHandle.next_id == self._hook_number
                and list(map(len, self._hook_owners)) == self._hook_counts
            )
        except Exception:  # A tensor was replaced by another one, or an attribute is gone.
            return False

    def send(self, journal: Journal, structure_changed: bool) -> bool:
        """Writes what has changed since note() into the journal. Returns whether something has.

        Raises ModelError for what cannot be sent; then nothing was noted, and the next call finds it again.
        """
        if not structure_changed and self._is_same():
            return False
        self._check()
        changes = [*self._changed_modules(), *self._changed_attributes(), *self._changed_hooks()]
        if changes:
            try:
                journal.write((CHANGES, [change for _, change in changes]), self._known)
            except Exception as error:
                what = next((what for what, change in changes if not is_picklable(change, self._known)), changes[0][0])
                raise ModelError(
                    f"after the start {what} was changed, and runners cannot be told: {type(error).__name__}: {error}. "
                    "Change it before the manager starts, or pass it as a buffer"
                ) from error
        self.note()
        return bool(changes)

    def _check(self) -> None:
        for (path, module), kind in zip(self._modules.items(), self._types, strict=True):
            if type(module) is not kind:
                raise ModelError(
                    f"after the start the class of module '{path}' of the model was replaced ({kind.__name__} by "
                    f"{type(module).__name__}, a parametrization?): start another manager for the changed model"
                )
        for kind, forward in self._forwards.items():
            if getattr(kind, "forward", None) is not forward:
                raise ModelError(
                    f"after the start {kind.__qualname__}.forward was replaced: runners compute with the former one. "
                    "Start another manager, or assign `forward` to the module itself"
                )
        now = {path: set(module._buffers) for path, module in self._model.named_modules() if module._buffers}
        for what, one, other in (("registered", now, self._buffer_keys), ("removed", self._buffer_keys, now)):
            for path, keys in one.items():
                if names := sorted(keys - other.get(path, set())):
                    raise ModelError(
                        f"after the start buffer '{path + '.' if path else ''}{names[0]}' of the model was {what}: the "
                        "session has the buffers with which the manager was started. Start another manager for the "
                        "changed model"
                    )

    def _changed_modules(self) -> Iterator[tuple[str, Change]]:
        for path, before in self._children.items():
            now = dict(self._modules[path]._modules)
            for key in [*before, *(key for key in now if key not in before)]:
                if before.get(key) is not now.get(key):
                    full = f"{path}.{key}" if path else key
                    yield f"module '{full}' of the model", ("module", (path, key, key in now, now.get(key)))

    def _changed_attributes(self) -> Iterator[tuple[str, Change]]:
        sent: set[tuple[str, str]] = set()
        for path, before in self._attributes.items():
            now = {key: value for key, value in vars(self._modules[path]).items() if key not in NOT_SENT}
            for key in [*before, *(key for key in now if key not in before)]:
                if key in before and key in now and _equal(before[key], now[key]):
                    continue
                sent.add((path, key))
                name = f"'{path}.{key}'" if path else f"'{key}'"
                yield f"attribute {name} of the model", ("attribute", (path, key, key in now, now.get(key)))
        for seen in self._inside.kinds:
            yield from seen.changes(sent)

    def _changed_hooks(self) -> Iterator[tuple[str, Change]]:
        for place, hooks in self._all_hooks():
            before = self._hooks.get(place, {})
            removed = [number for number in before if hooks.get(number) is not before[number]]
            added = {number: hook for number, hook in hooks.items() if before.get(number) is not hook}
            if place[0] is None and (removed or added):
                flag = torch_module._global_is_full_backward_hook
                yield "a hook of all modules", ("flag of all hooks", (flag,))
            if removed or added:
                where = f"'{place[0]}'" if isinstance(place[0], str) else "a parameter or of all modules"
                yield f"a hook of {where}", ("hooks", (place, removed, added))


class Follower:
    """The side of a runner: makes the host's changes on its own model."""

    def __init__(self, model: torch.nn.Module, tensors: list[torch.Tensor], handles: HooksOfTensors) -> None:
        """handles: of the hooks of tensors that came with the model."""
        self._model = model
        self._tensors = tensors
        self._handles = handles
        self._makers: dict[str, Callable[..., None]] = {
            "module": self._module,
            "attribute": self._attribute,
            "inside": self._inside,
            "tensor": self._tensor,
            "slots": self._slots,
            "array": self._array,
            "hooks": self._hooks,
            "flag of all hooks": self._flag,
        }

    @property
    def known(self) -> dict[Any, Any]:
        return {**dict(self._model.named_modules()), **dict(enumerate(self._tensors))}

    def make(self, changes: list[Change]) -> None:
        for kind, arguments in changes:
            self._makers[kind](*arguments)

    def _module(self, path: str, key: str, is_there: bool, module: torch.nn.Module | None) -> None:
        children = self._model.get_submodule(path)._modules
        if is_there:
            children[key] = module
        else:
            children.pop(key, None)

    def _attribute(self, path: str, key: str, is_there: bool, value: Any) -> None:
        attributes = vars(self._model.get_submodule(path))
        if is_there:
            attributes[key] = value
        else:
            attributes.pop(key, None)

    def _found(self, place: Place) -> Any:
        path, key, way = place
        return at(vars(self._model.get_submodule(path))[key], way)

    def _inside(self, place: Place, items: Any) -> None:
        put(self._found(place), items)

    def _tensor(self, place: Place, value: torch.Tensor) -> None:
        with torch.no_grad():
            self._found(place).copy_(value)

    def _slots(self, place: Place, values: dict[str, Any]) -> None:
        found = self._found(place)
        for name in set(_slots_of(found)) - set(values):
            object.__delattr__(found, name)
        for name, value in values.items():
            object.__setattr__(found, name, value)

    def _array(self, place: Place, value: Any) -> None:
        self._found(place)[...] = value

    def _hooks(self, place: tuple[Any, str], removed: list[int], added: dict[int, Any]) -> None:
        owner, name = place
        if isinstance(owner, int):
            self._hooks_of_tensor(owner, name, removed, added)
            return
        hooks = getattr(torch_module, name) if owner is None else vars(self._model.get_submodule(owner))[name]
        for number in removed:
            hooks.pop(number, None)
        hooks.update(added)

    def _flag(self, flag: bool | None) -> None:
        torch_module._global_is_full_backward_hook = flag

    def _hooks_of_tensor(self, number: int, name: str, removed: list[int], added: dict[int, Any]) -> None:
        tensor = self._tensors[number]
        for hook in removed:
            handle = self._handles.pop((number, name, hook), None)
            if handle is not None:
                handle.remove()
            else:  # A fork of the host has its hooks, by the same numbers.
                (getattr(tensor, name) or {}).pop(hook, None)
        for hook, function in added.items():
            self._handles[number, name, hook] = registrar_of(tensor, name)(function)
