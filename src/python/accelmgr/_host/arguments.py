# Runs in: the host.
"""Checks the arguments of a manager: configuration values, model and dataset."""

from __future__ import annotations

import json
import logging
import os
import reprlib
from collections.abc import Container, Mapping
from typing import Any

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from accelmgr._model.session_tensors import leaves_of
from accelmgr.errors import ConfigError, DataError, ModelError

logger = logging.getLogger("accelmgr")

Settings = list[tuple[str, str]]  # key=value, and how errors name it: "Manager(nprocs=0)".


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, tuple)):
        return json.dumps([_text(item) for item in value], ensure_ascii=False)  # YAML reads this as a list, too.
    return str(value)


def socket_of(service: str | os.PathLike[str]) -> str:
    """The text by which the native module finds a service. A str is a session's name or a path, others are paths."""
    return service if isinstance(service, str) else os.path.abspath(service)


def settings_of(call: str, options: Mapping[str, Any], names: tuple[str, ...] = (), prefix: str = "") -> Settings:
    """The values of a nested mapping as settings. `a__b` is the same as `a: {b: ...}`. None sets nothing.

    names: the keyword of `call` under which the mapping was passed, and the keys below it. Empty: `options` are the
    keywords themselves.
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


def settings_of_call(
    call: str,
    model: Any,
    dataset: Any,
    device: Any,
    config: Any,
    named: Mapping[str, Any],
    options: Mapping[str, Any],
) -> Settings:
    """The settings of a manager's arguments. Raises ConfigError for a kind that is not the one that was passed.

    named, options: the keywords of the configuration that the signature has, and further ones.
    """
    settings = settings_of(call, config, ("config",)) if isinstance(config, Mapping) else []
    settings += settings_of(call, named)
    settings += settings_of(call, options)
    if device is not None:
        where = f"{call}(device={str(device)!r})"
        kind, _, number = str(device).partition(":")
        numbered = kind == "cuda" and number != ""  # As torch names one GPU.
        settings.append((f"runners.device={kind if numbered else device}", where))
        if numbered:
            settings.append((f"runners.devices={number}", where))
    check_kind(settings, "model", model)
    check_kind(settings, "data", dataset)
    if isinstance(model, str):
        settings.append((f"model.kind={model}", f"{call}(model={model!r})"))
    if isinstance(dataset, str):
        settings.append((f"data.kind={dataset}", f"{call}(dataset={dataset!r})"))
    return settings


def is_named(passed: Any) -> bool:
    """True if the configuration defines the model or dataset: a name was passed, or nothing."""
    return passed is None or isinstance(passed, str)


WRAPPERS = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel")


TRAINABLE = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.complex128)
"""Dtypes of parameters that require gradients. Frozen ones have any dtype."""


def _check_memory(name: str, tensor: torch.Tensor) -> None:
    """Raises ModelError for a tensor that claims to be dense and on the CPU, but has no address."""
    if isinstance(tensor, (UninitializedParameter, UninitializedBuffer)):
        return  # Others say what is wrong.
    if tensor.is_quantized:
        return  # Each process has a copy.
    kind = type(tensor.data).__name__
    if is_traceable_wrapper_subclass(tensor) and isinstance(tensor, torch.nn.Parameter) and kind != "DTensor":
        if tensor.requires_grad:
            raise ModelError(
                f"parameter '{name}' is a {kind} and requires a gradient; only plain tensors can be trained: freeze "
                "it, and train adapters beside it"
            )
        for suffix, leaf in leaves_of(tensor):
            _check_memory(name + suffix, leaf)
        return
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided or tensor.numel() == 0:
        return
    try:
        has_memory = not is_traceable_wrapper_subclass(tensor) and tensor.data_ptr() != 0
    except RuntimeError:
        has_memory = False
    if not has_memory:
        remedy = "tensor.to_local() or tensor.full_tensor()" if kind == "DTensor" else "tensor.dequantize()"
        raise ModelError(
            f"'{name}' of the model is a {kind}, which has no memory of its own that processes could share; put a "
            f"plain tensor in its place ({remedy}) before the manager starts"
        )


def _check_modules(model: torch.nn.Module) -> None:
    if type(model).__name__ in WRAPPERS:
        raise ModelError(
            f"the model is a {type(model).__name__}, which averages gradients of processes by itself: pass "
            "model.module; the runners are the processes here"
        )
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.SyncBatchNorm):
            raise ModelError(
                f"'{name}' of the model is a SyncBatchNorm, but runners do not exchange the statistics of their "
                "batches; put a BatchNorm in its place, which has those of its runner's batch"
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise ModelError(
                f"'{name or type(module).__name__}' of the model is TorchScript, whose buffers and attributes lie "
                "outside Python: pass the module that it was made of, and script what was trained"
            )


def check(model: Any, dataset: Any, collate_fn: Any) -> None:
    """Raises ModelError, DataError or ConfigError if a manager cannot train `model` on `dataset`."""
    if model is not None and not isinstance(model, (torch.nn.Module, str)):
        raise ModelError(
            f"model is a {type(model).__name__}; it must be a torch.nn.Module, a function that makes one, or a "
            "built-in one's name"
        )
    if dataset is not None and not hasattr(dataset, "__iter__") and not hasattr(dataset, "__getitem__"):
        raise DataError(f"dataset is a {type(dataset).__name__}, which is neither iterable nor indexed")
    if collate_fn is not None and not callable(collate_fn):
        raise ConfigError(f"collate_fn is a {type(collate_fn).__name__}, which cannot be called", "collate_fn")
    if collate_fn is not None and (model is None or isinstance(model, str) or is_named(dataset)):
        raise ConfigError(
            "collate_fn has no effect with a built-in model or dataset: it needs a model and a dataset of Python",
            "collate_fn",
        )
    if model is None or isinstance(model, str):
        return
    _check_modules(model)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        _check_memory(name, tensor)
    for name, buffer in model.named_buffers():
        if buffer.requires_grad and buffer.is_leaf:
            raise ModelError(
                f"buffer '{name}' requires a gradient, but buffers are not trained: make it an nn.Parameter, or call "
                "requires_grad_(False)"
            )
    parameters = list(model.named_parameters())
    if not parameters:
        raise ModelError("the model has no parameters; there is nothing to train")
    for name, parameter in parameters:
        if hasattr(parameter, "grad_sample"):
            raise ModelError(
                f"parameter '{name}' has a grad_sample: opacus computes a gradient for each sample there, and runners "
                "give the mean gradient alone. Train a GradSampleModule in one process, or pass the module inside"
            )
        if parameter.requires_grad and parameter.dtype not in TRAINABLE:
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in TRAINABLE)
            raise ModelError(
                f"parameter '{name}' is {parameter.dtype} and requires a gradient; {known} can be trained: freeze it "
                "by requires_grad_(False), or convert it"
            )


def check_kind(settings: Settings, section: str, passed: Any) -> None:
    """Raises ConfigError if `settings` name another kind of model or dataset than the one that was passed."""
    if passed is None:
        return
    for assignment, where in settings:
        key, _, kind = assignment.partition("=")
        name = passed if isinstance(passed, str) else type(passed).__name__
        if key == f"{section}.kind" and (not isinstance(passed, str) or kind != name):
            text = f"{where}: {key} is '{kind}', but what was passed is '{name}'; leave the key out"
            raise ConfigError(text, key)


def check_given(call: str, model: Any, dataset: Any, keys: Container[str]) -> None:
    """Raises ModelError or DataError if one is neither passed nor in the configuration. keys: those that it sets."""
    if model is None and "model.kind" not in keys:
        raise ModelError(
            f"{call}() without a model: pass a torch.nn.Module, a function that makes one, or a built-in one's name; "
            "or name it in the configuration (model.kind)"
        )
    if dataset is None and "data.kind" not in keys:
        raise DataError(
            f"{call}() without a dataset: pass something iterable or indexed, or a built-in source's name; or name it "
            "in the configuration (data.kind)"
        )


def check_read(unread: list[tuple[str, str, str]], settings: Settings) -> None:
    """Raises ConfigError for settings of the call that have no effect; logs a warning for those of other sources.

    A file and the environment may serve other programs too.
    """
    places = {assignment.partition("=")[0]: where for assignment, where in settings}
    for key, source, why in unread:
        if source == "flag":
            raise ConfigError(f"{places[key]}: {key} has no effect on a Manager: {why}", key)
    others = [key for key, _, _ in unread if not key.startswith("launch.")]  # The launcher reads launch.*.
    if others:
        logger.warning("the configuration sets keys that a Manager does not read: %s", ", ".join(others))
