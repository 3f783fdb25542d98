# Runs in: the manager and runners.
"""Makes the model and the dataset in a manager process and its runners. The extension module calls it.

The host has sent them, or the configuration names a function that makes them (`model.factory`, `data.factory`).
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import reprlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from accelmgr import _native
from accelmgr._changes.grown_buffers import Forms, tell
from accelmgr._data.elements import Elements
from accelmgr._data.loaders import makes_batches
from accelmgr._data.reading import epochs_of, seed_generators
from accelmgr._model.session_tensors import tensors_of
from accelmgr._process import torch_settings
from accelmgr._runner import cuda as _cuda
from accelmgr._runner import xla
from accelmgr._runner.received import Received
from accelmgr._runner.replica import HostChanges, Replica, check_autocast, prepare_runner
from accelmgr._runner.replica_accelerator import AcceleratorReplica, check_build, open_device
from accelmgr._runner.replica_cuda import CudaReplica
from accelmgr._runner.replica_xla import XlaReplica
from accelmgr._serialization.pickling import send_definitions_to_workers
from accelmgr.errors import ConfigError, DataError, ModelError

Options = Mapping[str, str]
PAYLOAD = "payload"  # The key of model.options and data.options that says where the host's objects are.


def function_of(key: str, name: str) -> Any:
    """The function that `name`, package.module:function, refers to. Raises ConfigError with key and value."""
    module_name, colon, path = name.partition(":")
    if not name:
        raise ConfigError(
            f"{key} is empty; with {key.partition('.')[0]}.kind python it must name a function, as "
            "package.module:function",
            key,
        )
    if not colon or not module_name or not path:
        raise ConfigError(f"{key} is '{name}'; it must be package.module:function", key)
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # It is not `module_name` that is missing, but a module that it imports.
        raise ConfigError(
            f"{key} is '{name}': there is no module '{error.name}' on the path of this interpreter", key
        ) from error
    for attribute in path.split("."):
        if not hasattr(found, attribute):
            raise ConfigError(f"{key} is '{name}': {found!r} has no '{attribute}'", key)
        found = getattr(found, attribute)
    if not callable(found):
        raise ConfigError(f"{key} is '{name}', which is a {type(found).__name__} and cannot be called", key)
    return found


def made_by(key: str, name: str, options: Options) -> Any:
    return function_of(key, name)(**options)


def make_model(factory: str, options: Options) -> torch.nn.Module:
    model = made_by("model.factory", factory, options)
    if not isinstance(model, torch.nn.Module):
        raise ModelError(
            f"model.factory {factory} returned {reprlib.repr(model)}, a {type(model).__name__}; it must return a "
            "torch.nn.Module"
        )
    tensors_of(model)
    return model


def check_plain(model: torch.nn.Module, device: str) -> None:
    """Raises ConfigError for parameters that only runners on the CPU have."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_quantized or is_traceable_wrapper_subclass(tensor):
            kind = "quantized tensor" if tensor.is_quantized else type(tensor).__name__
            raise ConfigError(
                f"runners.device is {device}, but '{name}' of the model is a {kind}, with which only runners on the "
                "CPU compute; put plain tensors in its place (dequantize())",
                "runners.device",
            )


@functools.cache
def _opened_cuda(rank: int) -> _cuda.Cuda:
    return _cuda.Cuda(rank)


def open_cuda(settings: _native.ReplicaSettings) -> None:
    """Opens the device of this runner. Runners do that at the same time, and make their models one after the other."""
    prepare_runner(settings.threads, settings.shares_cores, settings.deterministic)
    if PAYLOAD in settings.options:
        torch_settings.apply(Received(settings.options[PAYLOAD]).options["settings"])
    _opened_cuda(settings.rank)


def make_replica(settings: _native.ReplicaSettings) -> Replica:
    options, rank, device, autocast = settings.options, settings.rank, settings.device, settings.autocast
    if device == "xla":
        xla.imported()
    computes = rank >= 0
    if computes:
        prepare_runner(settings.threads, settings.shares_cores, settings.deterministic)
    changes: HostChanges | None = None
    grown: Forms | None = None
    needed: Callable[[Forms], None] | None = None
    has_values = True
    if PAYLOAD not in options:
        seed_generators(settings.seed)  # So that the function draws the same numbers in all processes.
        model, collate_fn = make_model(settings.factory, options), None
    else:
        received = Received(options[PAYLOAD])
        torch_settings.apply(received.options["settings"])
        model, collate_fn = received.model(), received.load("collate_fn")
        grown = received.options["grown"] if device == "cpu" else None
        needed = functools.partial(tell, received.options["needed"])
        has_values = False
        if computes:
            sent = received.options
            changes = HostChanges(model, sent["host"], sent["places"], sent["calls"], sent["told"])
    if not computes:
        {"cuda": _cuda.check_build, "accelerator": check_build}.get(device, lambda: None)()
    if device != "cpu" and computes:
        check_plain(model, device)
    common: dict[str, Any] = {"autocast": autocast, "changes": changes}
    if device == "cpu" or not computes:
        if computes:
            check_autocast(autocast, torch.device("cpu"))
        return Replica(model, collate_fn, grown=grown, tell=needed, has_values=has_values, rank=rank, **common)
    common["patience_s"] = settings.step_timeout
    if device == "cuda":
        cuda = _opened_cuda(rank)
        check_autocast(autocast, cuda.device)
        return CudaReplica(model, collate_fn, cuda, records=settings.records, **common)
    if device == "accelerator":
        opened = open_device(rank, settings.oversubscribe)
        check_autocast(autocast, opened)
        return AcceleratorReplica(model, collate_fn, opened, **common)
    opened = xla.open_device(rank, settings.threads)
    check_autocast(autocast, opened)
    return XlaReplica(model, collate_fn, opened, accumulates=settings.micro_batches > 1, **common)


def _mixed(seed: int, other: int) -> int:
    """A seed of 63 bits, unlike both."""
    return int.from_bytes(hashlib.blake2b(f"data {seed} {other}".encode(), digest_size=8).digest(), "little") >> 1


def make_elements(factory: str, options: Options, epochs: int, seed: int) -> Elements:
    """All generators of this process begin with `seed`, and with what the host has seeded torch with."""
    if PAYLOAD in options:
        received = Received(options[PAYLOAD])
        torch_settings.apply(received.options["settings"])
        seed_generators(_mixed(seed, received.options["torch_seed"]))
        send_definitions_to_workers()
        return Elements(received.load("dataset"), received.options)
    seed_generators(_mixed(seed, 0))
    dataset = made_by("data.factory", factory, options)
    if isinstance(dataset, (str, bytes)) or not (hasattr(dataset, "__iter__") or hasattr(dataset, "__getitem__")):
        raise DataError(
            f"data.factory {factory} returned {reprlib.repr(dataset)}, a {type(dataset).__name__}; it must return "
            "something that is iterable or indexed"
        )
    if makes_batches(dataset):
        raise DataError(
            f"data.factory {factory} returned a DataLoader that makes batches, whose size the configuration does not "
            "know: return its dataset, or a DataLoader of batch_size=None, and set batch_size_per_device"
        )
    epochs = epochs_of(dataset, epochs)
    return Elements(dataset, {"as_bytes": False, "max_element_bytes": 0, "epochs": epochs})
