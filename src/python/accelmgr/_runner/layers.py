# Runs in: runners.
"""The layers of a model: while one computes, the parameters of the next are on their way to the device.

A layer is an entry of a list of modules (ModuleList, Sequential). Its parameters are awaited when its forward() begins,
and all others before the micro-batch. So a layer must not be used before it is called. The first micro-batch of a
runner, for which all parameters are awaited, shows which ones are, and in which order they are called.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from accelmgr import _native
from accelmgr._runner.cuda import Cuda


def layers_of(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The entries of the outermost lists."""
    if isinstance(module, (torch.nn.ModuleList, torch.nn.Sequential)) and len(module) > 1:
        yield from module.children()
    else:
        for child in module.children():
            yield from layers_of(child)


def is_compiled(model: torch.nn.Module) -> bool:
    """By torch.compile(), which would have to compile the hooks too."""
    return any(
        type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None
        for module in model.modules()
    )


class FirstUse(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not type __init_subclass__().
    """Calls `used` with each key of `memory`, a storage, that an operation uses."""

    def __init__(self, memory: dict[int, int], used: Callable[[int], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._memory = memory
        self._used = used

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for value in tree_iter((args, kwargs)):
            if isinstance(value, torch.Tensor) and value.layout is torch.strided:
                layer = self._memory.get(value.untyped_storage()._cdata)
                if layer is not None:
                    self._used(layer)
        return function(*args, **kwargs)


class Layers:
    """Waits for the parameters of each layer of a model when it is called."""

    def __init__(
        self,
        model: torch.nn.Module,
        parameters: Sequence[torch.Tensor],
        owners: Sequence[int],
        cuda: Cuda,
        transport: _native.CudaTransport,
    ) -> None:
        """owners: of each parameter, the one whose memory it shares, or -1."""
        self._cuda = cuda
        self._transport = transport
        self._owners = [index if owner < 0 else owner for index, owner in enumerate(owners)]
        self._called: list[int] = []  # Layers of the first micro-batch, in their order.
        self._early: set[int] = set()  # Those that it used before it called them.
        self._parts: list[int] = []  # Of each layer; 0: it is awaited before the micro-batch.
        self._last = 0
        self._awaited = 0
        layers = [] if is_compiled(model) else list(dict.fromkeys(layers_of(model)))
        self._own = self._own_parameters(model, layers, parameters)
        self._learns = bool(layers)
        self._memory = {
            parameters[index].untyped_storage()._cdata: layer for layer, own in enumerate(self._own) for index in own
        }
        for number, layer in enumerate(layers):
            layer.register_forward_pre_hook(self._hook(number))

    def _own_parameters(
        self, model: torch.nn.Module, layers: list[torch.nn.Module], parameters: Sequence[torch.Tensor]
    ) -> list[set[int]]:
        """The parameters of each layer that no other layer has, nor the rest of the model. Those that own memory."""
        index_of = {id(parameter): self._owners[index] for index, parameter in enumerate(parameters)}
        inside = {module for layer in layers for module in layer.modules()}
        held = [{index_of[id(parameter)] for parameter in layer.parameters()} for layer in layers]
        outside = {
            index_of[id(parameter)]
            for module in model.modules()
            if module not in inside
            for parameter in module.parameters(recurse=False)
        }
        return [
            own - outside - {index for other in range(len(held)) if other != layer for index in held[other]}
            for layer, own in enumerate(held)
        ]

    def _hook(self, layer: int) -> Callable[..., None]:
        def hook(module: torch.nn.Module, args: Any) -> None:
            if self._learns:
                if layer not in self._called:
                    self._called.append(layer)
            elif self._parts and self._parts[layer] > self._awaited:
                self._await(self._parts[layer])

        return hook

    def _await(self, part: int) -> None:
        stream = self._cuda.current_stream()
        self._transport.await_parameters(part, stream)
        if stream == self._cuda.compute_stream:  # Otherwise the model has a stream of its own.
            self._awaited = part
        self._cuda.catch_up()

    def loaded(self) -> None:
        """Parameters were loaded: those of part 0 are awaited."""
        self._awaited = 0

    def finish(self) -> None:
        """Awaits all."""
        if self._awaited < self._last:
            self._await(self._last)

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """In the block, the model computes forward()."""
        if not self._learns:
            yield
        else:
            self._called, self._early = [], set()  # Another attempt may have failed.
            with FirstUse(self._memory, self._note_use):
                yield
            self._learn()
        self.finish()

    def _note_use(self, layer: int) -> None:
        if layer not in self._called:
            self._early.add(layer)

    def _learn(self) -> None:
        order = [layer for layer in self._called if layer not in self._early and self._own[layer]]
        self._learns = False
        self._parts = [order.index(layer) + 1 if layer in order else 0 for layer in range(len(self._own))]
        self._last = len(order)
        part_of = {index: self._parts[layer] for layer, own in enumerate(self._own) for index in own}
        parts: list[list[int]] = [[] for _ in range(self._last + 1)]
        for index, owner in enumerate(self._owners):
            parts[part_of.get(owner, 0)].append(index)
        self._transport.split_parameters(parts)
        self._awaited = self._last  # All of them were, before the micro-batch.
