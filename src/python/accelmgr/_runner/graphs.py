# Runs in: runners.
"""Micro-batches as CUDA graphs: what forward and backward queue on a device is recorded once, and queued by one call
from then on.

A graph holds addresses, and nothing of what Python did. So inputs are copied to where those of the recording were, and
loss, scalars and gradients are found where it left its own. A model whose Python matters is refused, as far as that can
be seen: it waits for values of the device, computes on the CPU, draws random numbers there, or changes its attributes.
"""

from __future__ import annotations

import collections
import dataclasses
import os
import pickle
import random
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from accelmgr._data.elements import mapped, tensors_in
from accelmgr._runner.cuda import Cuda, Graph
from accelmgr._runner.outputs import Numbers
from accelmgr._serialization.describe import describe

WARM_UP = 3
"""Attempts before the first recording, with micro-batches of one form: libraries choose their kernels in these."""
MOST_CHANGES = 32
"""How often the form may change. A model whose micro-batches differ more often is not recorded."""
BY_INDEX = (torch.ops.aten.index, torch.ops.aten.index_put, torch.ops.aten.index_put_)
COPIES = (torch.ops.aten._to_copy, torch.ops.aten.copy_)
NOT_OF_MODELS = (os.path.dirname(torch.__file__), os.path.dirname(os.path.dirname(__file__)), "<")
OF_EVERY_MODULE = frozenset(vars(torch.nn.Module()))

Compute = Callable[[Any, torch.Tensor], Numbers]
"""Makes forward and backward pass, with inputs and a divisor of the loss."""


class NotRecordable(Exception):
    """Why micro-batches cannot be graphs."""


NOT_RECORDED = (NotRecordable, RuntimeError)
"""Errors that end a recording, not the attempt: if device or model is to blame, it fails without a graph, too."""


class RecordedGradients(Protocol):
    """Which gradients a graph completes."""

    def begin_recording(self) -> None: ...
    def end_recording(self) -> tuple[list[int], list[int]]:
        """Parameters in the order in which backward came to them, and those whose gradients tell when they are
        complete."""

    def replayed(self, order: list[int], complete: list[int]) -> None: ...


def form_of(inputs: Any) -> Any:
    """What micro-batches must have in common for one graph to serve them."""
    return mapped(lambda tensor: (tensor.dtype, tensor.layout, tuple(tensor.shape)), inputs)


def alike(form: Any, other: Any) -> bool:
    try:
        return bool(form == other)
    except Exception:  # Objects of other libraries.
        return False


def waits_for_values(function: Any, args: Any) -> bool:
    """Whether an operation waits for the device because what follows depends on values: item(), nonzero(), masks."""
    if getattr(function, "overloadpacket", None) in BY_INDEX:
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return bool({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(getattr(function, "tags", ())))


def is_constant(tensor: torch.Tensor) -> bool:
    """One number of the CPU: its value becomes part of a graph. HostState sees to it that it was not computed anew."""
    return tensor.device.type == "cpu" and tensor.dim() == 0


def place_in_model() -> str:
    """Where the model's own code is, if this thread runs it: ", at modeling_gpt2.py:547"."""
    for frame, line in traceback.walk_stack(sys._getframe()):
        if not frame.f_code.co_filename.startswith(NOT_OF_MODELS):
            return f", at {os.path.basename(frame.f_code.co_filename)}:{line}"
    return ""


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not type __init_subclass__().
    """Refuses operations that a graph would not repeat, and notes the memory from outside that they use."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self._made: set[int] = set()
        self.used: dict[int, torch.Tensor] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if waits_for_values(function, args):
            raise NotRecordable(f"the model waits for values of the device ({function}{place_in_model()})")
        if function.overloadpacket in COPIES and kwargs.get("device", self._device) != self._device:
            raise NotRecordable(f"the model computes on {kwargs['device']} too ({function}{place_in_model()})")
        for tensor in self._tensors_of(function, (args, kwargs)):
            storage = tensor.untyped_storage()._cdata
            if storage not in self._made:
                self.used[storage] = tensor
        result = function(*args, **kwargs)
        self._made.update(tensor.untyped_storage()._cdata for tensor in self._tensors_of(function, result))
        return result

    def _tensors_of(self, function: Any, values: Any) -> Iterator[torch.Tensor]:
        for value in tree_iter(values):
            if not isinstance(value, torch.Tensor):
                continue
            if value.device != self._device:
                if is_constant(value) and function.overloadpacket not in COPIES and not function._schema.is_mutable:
                    continue
                raise NotRecordable(f"the model computes on {value.device} too ({function}{place_in_model()})")
            if value.layout is not torch.strided:
                raise NotRecordable(f"the model has a tensor of layout {value.layout} ({function})")
            yield value


def _trace(value: Any) -> Any:
    """A value that differs after each change of an attribute that can be seen."""
    if isinstance(value, (bool, int, float, complex, str, bytes)):
        return type(value), repr(value)
    if isinstance(value, (list, tuple, set, frozenset, collections.deque)):
        return id(value), tuple(map(id, value))
    if isinstance(value, dict):
        return id(value), tuple(map(id, value)), tuple(map(id, value.values()))
    return id(value)


class HostState:
    """What forward() may change in this process beside the device, as it was when this object was made."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._attributes = [
            (f"{name}.{key}" if name else key, module, key, value, _trace(value))
            for name, module in model.named_modules()
            for key, value in vars(module).items()
            if key not in OF_EVERY_MODULE
        ]
        self._counts = [(name, module, len(vars(module))) for name, module in model.named_modules()]
        self._buffers = [(module._buffers, dict(module._buffers)) for module in model.modules()]
        self._random = random.getstate()
        self._numpy = sys.modules["numpy"].random.get_state() if "numpy" in sys.modules else None
        self._torch = torch.get_rng_state()

    def check(self) -> None:
        """Raises NotRecordable if something has changed."""
        for name, module, key, _, trace in self._attributes:
            if key not in vars(module) or _trace(vars(module)[key]) != trace:
                raise NotRecordable(f"forward() changes the model's attribute '{name}'")
        for name, module, count in self._counts:
            if len(vars(module)) != count:
                raise NotRecordable(f"forward() adds an attribute to {f'module {name!r}' if name else 'the model'}")
        if random.getstate() != self._random:
            raise NotRecordable("the model draws from Python's random numbers")
        if self._numpy is not None and pickle.dumps(sys.modules["numpy"].random.get_state()) != pickle.dumps(
            self._numpy
        ):
            raise NotRecordable("the model draws from NumPy's random numbers")
        if not torch.equal(torch.get_rng_state(), self._torch):
            raise NotRecordable("the model draws from the random numbers of the CPU")

    def restore(self) -> None:
        """Undoes what can be undone: the content of a list, for example, is not put back."""
        for _, module, key, value, _ in self._attributes:
            vars(module)[key] = value
        for buffers, before in self._buffers:
            buffers.update(before)
        random.setstate(self._random)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)
        torch.set_rng_state(self._torch)


@dataclasses.dataclass
class Recording:
    graph: Graph
    inputs: list[torch.Tensor]
    divisor: torch.Tensor
    loss: torch.Tensor
    scalars: list[tuple[str, torch.Tensor]]
    gradients: list[torch.Tensor | None]
    order: list[int]
    complete: list[int]
    used: list[torch.Tensor]
    """Memory from outside that the graph uses, for example a table that the model would replace by a larger one."""


class Graphs:
    """The graphs of a model's micro-batches: one each for the first, a middle and the last of an attempt.

    The first makes the gradients, and the others add to them. Micro-batches of another form are computed without a
    graph, and add to them too.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        cuda: Cuda,
        parameters: Sequence[torch.Tensor],
        gradients: RecordedGradients,
        say: Callable[[str], None],
    ) -> None:
        self._model = model
        self._cuda = cuda
        self._parameters = parameters
        self._gradients = gradients
        self._say = say
        self._refused = False
        self._changes = 0
        self._form: Any = None
        self.forget()

    def forget(self) -> None:
        """Called when the model's modes have changed, and with them what it computes."""
        self._recordings: dict[tuple[bool, bool], Recording] = {}
        self._warm = 0
        self._first = True

    def begin_attempt(self) -> None:
        self._first = True

    def end_attempt(self) -> None:
        self._warm += 1

    def run(self, inputs: Any, divisor: torch.Tensor, last: bool, compute: Compute) -> Numbers:
        """Calls compute(), or a graph that does the same. Later micro-batches do not change the numbers."""
        first, self._first = self._first, False
        if self._refused or not self._serves(form_of(inputs), first, last):
            return compute(inputs, divisor)
        recording = self._recordings.get((first, last))
        if recording is None:
            try:
                recording = self._recorded(inputs, divisor, first, compute)
            except NOT_RECORDED as error:
                self._refuse(str(error) if isinstance(error, NotRecordable) else describe(error).partition("\n")[0])
                return compute(inputs, divisor)
            self._recordings[first, last] = recording
        return self._replayed(recording, inputs, divisor)

    def _serves(self, form: Any, first: bool, last: bool) -> bool:
        if self._recordings:
            return alike(form, self._form) and (first or self._has_gradients_for(last))
        if not alike(form, self._form):
            self._form, self._warm = form, 0
            self._changes += 1
            if self._changes > MOST_CHANGES:
                self._refuse("micro-batches differ in their shapes, or in what they have beside tensors")
        return first and self._warm >= WARM_UP

    def _has_gradients_for(self, last: bool) -> bool:
        """Whether the gradients lie where the graph of a further micro-batch has them, or where it may be recorded."""
        recorded = self._recordings.get((False, last))
        places = [recorded] if recorded else [each for (first, _), each in self._recordings.items() if first]
        return any(
            all(parameter.grad is place for parameter, place in zip(self._parameters, each.gradients, strict=True))
            for each in places
        )

    def _refuse(self, reason: str) -> None:
        self._recordings = {}
        self._refused = True
        self._say(f"runners.cuda_graph: micro-batches are not recorded, each kernel is queued by itself: {reason}")

    def _recorded(self, inputs: Any, divisor: torch.Tensor, first: bool, compute: Compute) -> Recording:
        own_inputs = mapped(torch.clone, inputs)
        own_divisor = divisor.clone()
        shared = next((recording.graph for recording in self._recordings.values()), None)
        graph = self._cuda.new_graph(shared)
        watch = Watch(self._cuda.device)
        before = [parameter.grad for parameter in self._parameters]
        host = HostState(self._model)
        generator = self._cuda.generator_state()
        self._gradients.begin_recording()
        order: list[int] = []
        complete: list[int] = []
        try:
            try:
                with graph.recording(), watch:
                    loss, scalars = compute(own_inputs, own_divisor)
            finally:
                order, complete = self._gradients.end_recording()
            host.check()
            after = [parameter.grad for parameter in self._parameters]
            if not first:
                self._check_gradients(before, after)
            numbers = self._tensors_of(scalars)
        except BaseException:
            host.restore()
            self._cuda.replace_generator(generator)
            for parameter, gradient in zip(self._parameters, before, strict=True):
                parameter.grad = gradient
            raise
        return Recording(
            graph, tensors_in(own_inputs), own_divisor, loss, numbers, after, order, complete, list(watch.used.values())
        )

    @staticmethod
    def _tensors_of(scalars: list[tuple[str, float | torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
        numbers = []
        for name, value in scalars:
            if not isinstance(value, torch.Tensor):
                raise NotRecordable(f"the model's output '{name}' is a number of Python")
            numbers.append((name, value))
        return numbers

    def _check_gradients(self, before: list[torch.Tensor | None], after: list[torch.Tensor | None]) -> None:
        for parameter, one, other in zip(self._parameters, before, after, strict=True):
            if one is not other:
                name = next(name for name, own in self._model.named_parameters() if own is parameter)
                raise NotRecordable(
                    f"the gradient of '{name}' is replaced where another micro-batch adds to it (by a hook?)"
                )

    def _replayed(self, recording: Recording, inputs: Any, divisor: torch.Tensor) -> Numbers:
        for to, value in zip(recording.inputs, tensors_in(inputs), strict=True):
            to.copy_(value)
        recording.divisor.copy_(divisor)
        recording.graph.replay()
        for parameter, gradient in zip(self._parameters, recording.gradients, strict=True):
            parameter.grad = gradient
        self._gradients.replayed(recording.order, recording.complete)
        return recording.loss.clone(), [(name, value.clone()) for name, value in recording.scalars]
