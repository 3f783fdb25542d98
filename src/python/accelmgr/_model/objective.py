# Runs in: the host, the manager and runners.
"""What a session trains besides the model: the loss that the script computes from the model's outputs, and other
modules and tensors with parameters."""

from __future__ import annotations

import collections.abc
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch

from accelmgr._serialization.describe import describe
from accelmgr.errors import ConfigError, ModelError

Loss = Callable[..., Any] | int | str
"""A criterion, a function of outputs and batch, or the place of the loss in what the model returns."""
Extra = list[Any] | tuple[Any, ...] | dict[str, Any]
"""Modules and leaf tensors."""

POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def call(model: Callable[..., Any], inputs: Any) -> Any:
    """Calls a model with a mapping as its keyword arguments, a tuple as its positional ones, or with one object."""
    if isinstance(inputs, collections.abc.Mapping):
        return model(**inputs)
    if is_sequence(inputs):
        return model(*inputs)
    return model(inputs)


def is_sequence(inputs: Any) -> bool:
    return isinstance(inputs, (tuple, list)) and not isinstance(inputs, torch.nn.utils.rnn.PackedSequence)


def _arguments_of(function: Callable[..., Any]) -> list[inspect.Parameter] | None:
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # Compiled code does not say.
        return None


def _is_criterion(loss: Callable[..., Any]) -> bool:
    while isinstance(loss, functools.partial):
        loss = loss.func
    return isinstance(loss, torch.nn.Module) or getattr(loss, "__module__", None) == torch.nn.functional.__name__


def check_loss(loss: Any) -> None:
    """Raises ConfigError unless it is one of Loss."""
    if isinstance(loss, str) or (isinstance(loss, int) and not isinstance(loss, bool)):
        return
    if not callable(loss) or isinstance(loss, type):
        what = f"the class {loss.__name__}" if isinstance(loss, type) else f"a {type(loss).__name__}"
        raise ConfigError(
            f"loss is {what}; it must be a criterion (nn.CrossEntropyLoss()), a function of outputs and batch, or the "
            "place of the loss in what the model returns (1, 'nll')",
            "loss",
        )
    try:
        inspect.signature(loss.forward if isinstance(loss, torch.nn.Module) else loss).bind(None, None)
    except TypeError as error:
        given = "outputs and targets" if _is_criterion(loss) else "outputs and batch"
        raise ConfigError(
            f"loss is called with {given}, which {getattr(loss, '__name__', type(loss).__name__)} does not take "
            f"({error}); pass a function: loss=lambda outputs, batch: ...",
            "loss",
        ) from None
    except ValueError:
        pass  # Compiled code does not say.


class Objective(torch.nn.Module):
    """A model, its loss and `extra` as one module. Names of the model's own modules and tensors are as without it.

    The model is called without the targets. Of a tuple these are the last element (none, if forward() has no default
    for any element), of a mapping the entries that forward() does not name, of another batch none. A criterion, which
    is a module or a function of torch.nn.functional, gets outputs and targets; another function gets outputs and the
    whole batch.
    """

    def __init__(self, model: torch.nn.Module, loss: Loss | None, extra: Extra) -> None:
        """Raises ConfigError for what is no loss or cannot be extra."""
        super().__init__()
        if loss is not None:
            check_loss(loss)
        self._modules[""] = model
        self._tensors: dict[str, torch.Tensor] = {}
        self.__dict__["_loss"] = loss  # A module that is listed below, or in the model.
        added = extra if isinstance(extra, dict) else {f"extra.{index}": one for index, one in enumerate(extra)}
        for name, one in added.items():
            self._add(name, one)
        if isinstance(loss, torch.nn.Module):
            name = "loss"
            while name in self._names():
                name += "_"
            self._add(name, loss)

    def _names(self) -> set[str]:
        return {name for name, _ in (*self.named_modules(), *self.named_parameters(), *self.named_buffers())}

    def _add(self, name: str, one: Any) -> None:
        if any(one is own for own in (*self.modules(), *self.parameters())):
            return  # It is part of the session already.
        if not isinstance(name, str) or not name or name in self._names():
            raise ConfigError(
                f"extra: {name!r} is no name that the model leaves free; choose another: extra={{'name': ...}}", "extra"
            )
        if isinstance(one, torch.nn.Module):
            self._modules[name] = one
        elif isinstance(one, torch.nn.Parameter) or (
            isinstance(one, torch.Tensor) and one.is_leaf and one.requires_grad
        ):
            self._tensors[name] = one
        else:
            what = ", but was computed or requires no gradient" if isinstance(one, torch.Tensor) else ""
            raise ConfigError(
                f"extra: '{name}' is of type {type(one).__name__}{what}; extra takes modules, parameters, and tensors "
                "that were made with requires_grad=True: extra=[criterion], or extra={'log_alpha': log_alpha}",
                "extra",
            )

    # As a module

    @property
    def model(self) -> torch.nn.Module:
        model = self._modules[""]
        assert model is not None
        return model

    def named_modules(
        self, memo: set[torch.nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.nn.Module]]:
        """The modules without this one: the root, whose name is empty, is the model."""
        memo = set() if memo is None else memo
        for name, module in self._modules.items():
            assert module is not None
            yield from module.named_modules(memo, ".".join(filter(None, (prefix, name))), remove_duplicate)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.nn.Parameter]]:
        yield from super().named_parameters(prefix, recurse, remove_duplicate)
        for name, tensor in self._tensors.items():
            yield name, cast(torch.nn.Parameter, tensor)

    def get_submodule(self, target: str) -> torch.nn.Module:
        return dict(self.named_modules(remove_duplicate=False))[target]

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The state of the model: loss and extra have a state_dict() of their own."""
        return self.model.state_dict(*args, **kwargs)

    # As a function of a batch

    @property
    def place(self) -> int | str | None:
        """The place of the loss in what forward() returns."""
        loss = self.__dict__["_loss"]
        return loss if isinstance(loss, (int, str)) else None

    @functools.cached_property
    def _taken(self) -> tuple[set[str] | None, int]:
        """The names of the arguments of the model's forward() (None: any), and how many have no default."""
        model = getattr(self.model, "_orig_mod", self.model)  # torch.compile() wraps it.
        found = _arguments_of(model.forward)
        if found is None:
            return None, 0
        names = {argument.name for argument in found if argument.kind in NAMED}
        needed = sum(argument.kind in POSITIONAL and argument.default is argument.empty for argument in found)
        return None if any(argument.kind is argument.VAR_KEYWORD for argument in found) else names, needed

    def forward(self, batch: Any) -> Any:
        """Returns what contains the loss of the batch."""
        loss = self.__dict__["_loss"]
        if not callable(loss):
            return call(self.model, batch)
        inputs, targets = self._divided(batch)
        outputs = call(self.model, inputs)
        if not _is_criterion(loss):
            try:
                return loss(outputs, batch)
            except (TypeError, AttributeError) as error:  # It may expect the targets.
                raise ModelError(
                    f"{describe(error)}\n(the function that is the loss was given outputs and the whole batch, a "
                    f"{type(batch).__name__}; a criterion, which is a module, is given outputs and targets)"
                ) from error
        if len(targets) != 1:
            left = ", ".join(targets) or "nothing"
            raise ModelError(
                f"the loss, a criterion, is called with outputs and targets, but of the batch forward() leaves {left}; "
                "pass a function that chooses: loss=lambda outputs, batch: criterion(outputs, batch[...])"
            )
        return loss(outputs, *targets.values())

    def _divided(self, batch: Any) -> tuple[Any, dict[str, Any]]:
        """What the model is called with, and the targets by name."""
        names, needed = self._taken
        if isinstance(batch, collections.abc.Mapping):
            inputs = {key: value for key, value in batch.items() if names is None or key in names}
            if not inputs:
                raise ModelError(
                    f"the batch has {', '.join(map(str, batch))}, which forward() does not name; its arguments are: "
                    f"{', '.join(names or ())}"
                )
            return inputs, {str(key): value for key, value in batch.items() if key not in inputs}
        if not is_sequence(batch):
            return batch, {"batch": batch}
        if needed >= len(batch):
            return batch, {}
        return batch[0] if len(batch) == 2 else tuple(batch[:-1]), {"its last": batch[-1]}


def whole(model: torch.nn.Module, loss: Loss | None, extra: Extra | None) -> torch.nn.Module:
    """What a manager trains: an Objective, or the model if that is all."""
    if extra is not None and not isinstance(extra, (list, tuple, dict)):
        what = f"extra is a {type(extra).__name__}"
        raise ConfigError(f"{what}; it must be a list or a dict, as in extra=[criterion]", "extra")
    return model if loss is None and not extra else Objective(model, loss, extra or ())


def made_whole(factory: Callable[[], Any], loss: Loss | None, extra: Extra | None) -> Any:
    """whole() of what the factory makes."""
    model = factory()
    return whole(model, loss, extra) if isinstance(model, torch.nn.Module) else model


def model_of(module: torch.nn.Module | None) -> torch.nn.Module | None:
    """The script's own model."""
    return module.model if isinstance(module, Objective) else module
