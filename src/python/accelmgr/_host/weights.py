# Runs in: the host.
"""The initial values of a model that was made on the meta device, from safetensors files."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterable
from typing import Any

import torch

from accelmgr._memory.tensors import unfilled, write
from accelmgr.errors import ConfigError, ModelError

Files = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]
"""Paths, or patterns as glob() has them."""


def made_empty(factory: Callable[[], torch.nn.Module]) -> torch.nn.Module:
    """The model, with its parameters in memory that has no values and is not touched yet."""
    model = factory()
    if isinstance(model, torch.nn.Module):
        _materialize(model)
    return model


def _materialize(model: torch.nn.Module) -> None:
    made: dict[int, torch.nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None or not parameter.is_meta:
                continue
            if id(parameter) not in made:
                with unfilled():
                    values = torch.empty_like(parameter.data, device="cpu")
                made[id(parameter)] = torch.nn.Parameter(values, requires_grad=parameter.requires_grad)
                made[id(parameter)].__dict__.update(parameter.__dict__)
            module._parameters[name] = made[id(parameter)]


class Weights:
    """The tensors of safetensors files, by name. They are mapped: one that is not read takes no memory."""

    def __init__(self, files: Files) -> None:
        """Raises ConfigError if there is no such file or no package safetensors, ModelError for a file that is none."""
        try:
            import safetensors
        except ImportError as error:
            raise ConfigError("weights needs the package safetensors: pip install safetensors", "weights") from error
        patterns = [files] if isinstance(files, (str, os.PathLike)) else list(files)
        self._places: dict[str, tuple[Any, str]] = {}
        for pattern in patterns:
            paths = sorted(glob.glob(os.fspath(pattern)))
            if not paths:
                raise ConfigError(f"weights: there is no file '{os.fspath(pattern)}'", "weights")
            for path in paths:
                try:
                    file: Any = safetensors.safe_open(path, framework="pt")
                except (OSError, safetensors.SafetensorError) as error:
                    raise ModelError(f"weights: '{path}' cannot be read: {error}") from error
                for name in file.keys():
                    if name in self._places:
                        raise ModelError(f"weights: '{name}' is in '{self._places[name][1]}' and in '{path}'")
                    self._places[name] = (file, path)

    def check(self, model: torch.nn.Module) -> None:
        """Raises ModelError unless the files have each parameter, in its shape, and nothing the model does not have.

        Loads persistent buffers that the files have.
        """
        names: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        self._found = {own[0]: next((name for name in own if name in self._places), None) for own in names.values()}
        unused = set(self._places)
        for name, parameter in model.named_parameters():
            found = self._found[name]
            if found is None:
                raise ModelError(f"weights: no file has the parameter '{name}', {list(parameter.shape)}")
            self._check_shape(found, parameter)
            unused.difference_update(names[id(parameter)])
        for name, buffer in model.named_buffers():
            if name in self._places and not buffer.is_meta:
                self._check_shape(name, buffer)
                write(buffer, self._read(name))
            elif buffer.is_meta:
                raise ModelError(
                    f"buffer '{name}' is on the meta device, where it has no values: make buffers on the CPU "
                    "(accelerate.init_empty_weights(include_buffers=False) does, for instance)"
                )
            unused.discard(name)
        if unused:
            listed = ", ".join(sorted(unused)[:5])
            raise ModelError(f"weights: the files have {len(unused)} tensors that the model does not have: {listed}")

    def _check_shape(self, name: str, tensor: torch.Tensor) -> None:
        file, path = self._places[name]
        shape = file.get_slice(name).get_shape()
        if list(tensor.shape) != shape:
            raise ModelError(f"weights: '{name}' of '{path}' has the shape {shape}; the model has {list(tensor.shape)}")

    def _read(self, name: str) -> torch.Tensor:
        file, _ = self._places[name]
        tensor: torch.Tensor = file.get_tensor(name)
        return tensor

    def value(self, name: str, own: torch.Tensor) -> torch.Tensor:
        """The value of the parameter of this name. For a buffer it is `own`, which check() has loaded.

        Requires: check() was called.
        """
        found = self._found.get(name)
        return own if found is None else self._read(found)

    def load(self, model: torch.nn.Module) -> None:
        """Writes all parameters.

        Requires: check() was called.
        """
        for name, parameter in model.named_parameters():
            write(parameter, self.value(name, parameter))
