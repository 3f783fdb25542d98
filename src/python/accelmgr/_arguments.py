"""What a manager is called with: the values of a configuration, and models and datasets that it can train."""

from __future__ import annotations

import logging
import reprlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from accelmgr._feed import is_indexed
from accelmgr.errors import ConfigError, DataError, ModelError

logger = logging.getLogger("accelmgr")

Settings = list[tuple[str, str]]  # key=value, and how errors name it: "Manager(nprocs=0)".


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, tuple)):
        return ",".join(_text(item) for item in value)
    return str(value)


def settings_of(call: str, options: Mapping[str, Any], names: tuple[str, ...] = (), prefix: str = "") -> Settings:
    """Every value of a nested mapping; `a__b` is the same as `a: {b: ...}`; None: left as it is.

    `names`: the keyword of `call` under which the mapping was passed, and the keys below it; none: it is the keywords.
    """
    settings: Settings = []
    for name, value in options.items():
        key, path = prefix + name.replace("__", "."), (*names, name)
        if isinstance(value, Mapping):
            settings += settings_of(call, value, path, key + ".")
        elif value is not None:
            text = reprlib.repr(value)
            for outer in reversed(path[1:]):
                text = f"{{{outer!r}: {text}}}"
            settings.append((f"{key}={_text(value)}", f"{call}({path[0]}={text})"))
    return settings


def batches_of(dataset: Any) -> str:
    """How a DataLoader makes batches; empty for any other dataset, and for one that gives single elements."""
    if not isinstance(dataset, torch.utils.data.DataLoader) or dataset.batch_sampler is None:
        return ""
    return f"batch_size={dataset.batch_size}" if dataset.batch_size is not None else "a batch_sampler"


def check(model: Any, dataset: Any, collate_fn: Any) -> None:
    """Whether a manager can train the one on the other. Raises ModelError, DataError, ConfigError."""
    if not isinstance(model, (torch.nn.Module, str)):
        raise ModelError(
            f"model is a {type(model).__name__}; it must be a torch.nn.Module, a function that makes one, or a "
            "built-in one's name"
        )
    if not isinstance(dataset, str) and not hasattr(dataset, "__iter__") and not hasattr(dataset, "__getitem__"):
        raise DataError(f"dataset is a {type(dataset).__name__}, which is neither iterable nor indexed")
    if collate_fn is not None and not callable(collate_fn):
        raise ConfigError(f"collate_fn is a {type(collate_fn).__name__}, which cannot be called", "collate_fn")
    if collate_fn is not None and (isinstance(model, str) or isinstance(dataset, str)):
        raise ConfigError(
            "collate_fn has no effect with a built-in model or dataset: it makes batches of a dataset of Python "
            "for a model of Python",
            "collate_fn",
        )
    if collate_fn is None and (batches := batches_of(dataset)):
        raise DataError(
            f"dataset is a DataLoader that makes batches ({batches}), and a manager makes batches of its elements "
            "itself: pass loader.dataset, or a DataLoader of batch_size=None, and batch_size_per_device; or a "
            "collate_fn that takes a list of the loader's batches"
        )
    if isinstance(model, str):
        return
    parameters = list(model.named_parameters())
    if not parameters:
        raise ModelError("the model has no parameters; there is nothing to train")
    for name, parameter in parameters:
        if parameter.dtype not in (torch.float32, torch.float64):
            raise ModelError(
                f"parameter '{name}' is {parameter.dtype}; the master's are float32 or float64, as mixed precision "
                "needs them: pass model.float(), and runners__autocast=\"bf16\" to compute in bfloat16"
            )
        if parameter.dtype != parameters[0][1].dtype:
            raise ModelError(
                f"parameter '{name}' is {parameter.dtype}, '{parameters[0][0]}' {parameters[0][1].dtype}; all have "
                "one dtype: pass model.float() or model.double()"
            )


def check_kind(settings: Settings, section: str, passed: Any) -> None:
    """A model or dataset that is passed is the kind."""
    for assignment, where in settings:
        key, _, kind = assignment.partition("=")
        name = passed if isinstance(passed, str) else type(passed).__name__
        if key == f"{section}.kind" and (not isinstance(passed, str) or kind != name):
            text = f"{where}: {key} is '{kind}', but what was passed is '{name}'; leave the key out"
            raise ConfigError(text, key)


def check_read(unread: list[tuple[str, str, str]], settings: Settings) -> None:
    """A file and the environment may serve other programs too: what nothing reads of them is no error."""
    places = {assignment.partition("=")[0]: where for assignment, where in settings}
    for key, source, why in unread:
        if source == "flag":
            raise ConfigError(f"{places[key]}: {key} has no effect on a Manager: {why}", key)
    others = [key for key, _, _ in unread if not key.startswith("launch.")]  # The launcher reads launch.*.
    if others:
        logger.warning("the configuration sets keys that a Manager does not read: %s", ", ".join(others))


def epochs_of(dataset: Any, epochs: int | None) -> int:
    """How often the dataset is read."""
    if epochs is None or epochs == 1 or isinstance(dataset, str):
        return 1
    if isinstance(dataset, Iterator):
        again = f"the dataset is a {type(dataset).__name__}, which can be iterated once"
    elif is_indexed(dataset) and not hasattr(dataset, "__len__"):
        again = f"the dataset, a {type(dataset).__name__}, has no length, after which it would begin again"
    else:
        return epochs
    raise ConfigError(f"data.epochs is {epochs}, but {again}; pass a list or another iterable", "data.epochs")
