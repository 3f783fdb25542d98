# Runs in: runners.
"""The replica of a Python model, with which a runner computes. The extension module calls it.

Memory is passed by address. The parameters are tensors over the session's memory. Each gradient goes to the runner as
soon as autograd has made it.
"""

from __future__ import annotations

import collections
import contextlib
import enum
import pickle
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from accelmgr import _native
from accelmgr._changes.buffers import Buffers
from accelmgr._changes.calls import answer
from accelmgr._changes.grown_buffers import Forms
from accelmgr._changes.model_changes import MODES, OF_HOST, Structure
from accelmgr._changes.record import NOTHING, PUBLISHED, Reader
from accelmgr._data.elements import PICKLED, collated, mapped, restore_structure, structure_of
from accelmgr._data.long_elements import element_in
from accelmgr._data.reading import seed_generators
from accelmgr._memory.tensors import dense_over, dtype_name, tensor_over, write_bytes
from accelmgr._model import aliases
from accelmgr._model.constants import CHANGES, Constants
from accelmgr._model.objective import Objective, call
from accelmgr._model.session_tensors import named_leaves
from accelmgr._process import torch_settings
from accelmgr._runner.gradient_hooks import GRADIENT, GradientHooks
from accelmgr._runner.outputs import Numbers, read_outputs
from accelmgr._runner.outside import Outside
from accelmgr._serialization.describe import describe
from accelmgr._updates.inner import OPTIMIZERS, Order, Resident, check_made, parameters_of
from accelmgr._updates.joint_update import JointUpdate, Place
from accelmgr._updates.optimizer_pickling import received
from accelmgr.errors import ConfigError, ModelError

Field = tuple[str, str, tuple[int, ...], Any]
"""A field of a micro-batch: name, dtype, shape, and the bytes, which are valid while run() lasts."""
Description = tuple[str, str, tuple[int, ...], tuple[int, ...], int, int, bool]
"""A tensor's name, dtype, shape, strides, address, identity; requires a gradient (parameter), persistent (buffer)."""

AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""The dtypes of `runners.autocast`, which may also be "off"."""

WRONG_ARGUMENTS = re.compile(r"forward\(\) (takes .* positional argument|got an unexpected keyword argument)")
"""The text of a TypeError when forward() is called with wrong arguments."""

_address = torch.Tensor.data_ptr


class Abandoned(Exception):
    """The attempt is over, and its work is left unfinished. It is no error."""


def described(name: str, tensor: torch.Tensor, flag: bool) -> Description:
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        raise ModelError(
            f"'{name}' of the model is on {tensor.device}, {tensor.layout}; a replica's tensors must be dense and on "
            "the CPU"
        )
    dtype = dtype_name(tensor.dtype)
    return name, dtype, tuple(tensor.shape), tensor.stride(), tensor.data_ptr(), id(tensor), flag


def _text_of(inputs: Any) -> str:
    """ "input float32 [4, 16], target int64 [4]" """
    texts = []
    for name, value in zip(*structure_of(inputs), strict=True):
        kind = type(value).__name__
        if isinstance(value, torch.Tensor):
            kind = f"{dtype_name(value.dtype)} {list(value.shape)}"
        texts.append(f"{'' if name.startswith('<') else name + ' '}{kind}")
    return ", ".join(texts)


class Change(enum.IntEnum):
    """What the host has changed of the model."""

    NOTHING = 0
    VALUES = 1
    """The model computes with other values."""
    TENSORS = 2
    """The loss may depend on other tensors, too."""


class HostChanges:
    """What the host has published since the processes began: see record.py."""

    def __init__(
        self, model: torch.nn.Module, host: int, places: int, calls: str, told: Sequence[torch.Tensor]
    ) -> None:
        """host: its pid. places: see Structure. calls: the address of the host's Calls. told: tensors of the script, by
        their numbers."""
        self._reader = Reader(host)
        self._calls = calls
        self._told = told
        self.order: Order | None = None
        """The order of the present step, if it is an inner one."""
        self.places = places
        self._model = model
        self._times: collections.Counter[tuple[str, ...]] = collections.Counter()
        """How often an attribute was changed."""

    def make(self, place: bytes, held: list[str]) -> Change:
        """Makes the changes published at `place`. held: attributes with later values, which came as buffers do."""
        modules: dict[str, torch.nn.Module] = {}
        made = Change.NOTHING
        for (kind, *where), value in self._reader.changes(place):
            if kind == "order":
                self.order = pickle.loads(value)
                continue
            made = max(made, Change.VALUES)
            if kind == "setting":
                torch_settings.apply({where[0]: value})
                continue
            if kind == "tensor":
                write_bytes(self._told[int(where[0])], value)
                continue
            path, name = where
            if (f"{path}.{name}" if path else name) in held:
                continue
            modules = modules or dict(self._model.named_modules())
            attributes: dict[str, Any] = modules[path].__dict__
            self._times[path, name] += 1
            is_number = isinstance(value, (bool, int, float, complex, str, bytes, type(None)))
            # A number that changes once may begin another phase; one that changes in each step does not.
            if not is_number or self._times[path, name].bit_count() == 1:
                made = Change.TENSORS
            before = attributes.get(name)
            if type(value) is not type(before) or not _written_in_place(before, value):
                attributes[name] = value
        return made

    def call(self) -> None:
        """Makes the call that the host has put into its Calls, with the model as the script knows it."""
        answer(self._calls, self._model._modules[""] if isinstance(self._model, Objective) else self._model)


def _written_in_place(before: Any, value: Any) -> bool:
    """Writes in place where that can be done: other objects may have the old value, too. Returns whether it was."""
    if isinstance(before, torch.Tensor):
        fits = before.shape == value.shape and before.dtype == value.dtype and not before.is_inference()
        if fits:
            before.detach().copy_(value)
        return fits
    if isinstance(before, (list, dict)):
        before.clear()
        before.extend(value) if isinstance(before, list) else before.update(value)
        return True
    return False


class Replica:
    """Implements engine/replica/replica.hpp, which documents the members, on the CPU. Others compute on a device."""

    _device_type = "cpu"

    def __init__(
        self,
        model: torch.nn.Module,
        collate_fn: Any,
        *,
        autocast: str = "off",
        changes: HostChanges | None = None,
        grown: Forms | None = None,
        tell: Callable[[Forms], None] | None = None,
        has_values: bool = True,
        rank: int = 0,
    ) -> None:
        """changes: what the host changes after the start; None if it does not have the model. grown, tell: see Buffers.

        has_values: False if the parameters get theirs from the host.
        """
        self._has_values = has_values
        self._rank = rank
        self._model = model
        self._place = model.place if isinstance(model, Objective) else None
        self._changes = changes
        self._collate_fn = collate_fn or torch.utils.data.default_collate
        self._autocast_dtype = AUTOCAST_DTYPES.get(autocast)
        self._structure = Structure(model, changes.places if changes is not None else 0)
        self._buffers = Buffers(model, grown, tell)
        self._constants = Constants(model)
        self._tell = tell
        self._followed = (NOTHING, self._structure.modes)
        self._published, self._modes = map(bytearray, self._followed)
        self._of_host = [torch.frombuffer(content, dtype=torch.uint8) for content in (self._published, self._modes)]
        leaves = named_leaves(model)
        self._parameters = [leaf for _, leaf in leaves]
        self._names = [name for name, _ in leaves]
        self._outside = Outside(model, self._parameters)
        self._rounded: tuple[str, torch.dtype, torch.dtype] | None = None
        """The first parameter that has another dtype here than in the host, and both dtypes."""
        self._gradients: GradientHooks | None = None
        self._runner: _native.RunnerSide | None = None
        self._addresses: list[int] = []
        self._buffer_addresses: list[int] = []
        self._places: list[Place] = []
        self._resident: Resident | None = None
        """The runner's optimizer, if the last step was an inner one."""
        self._joint: JointUpdate | None = None
        """Set if the resident optimizer updates a part of the parameters."""
        self._order: Order | None = None
        """The last order that was followed."""
        self._losses: list[torch.Tensor] = []
        self._scalars: list[tuple[str, float | torch.Tensor, float]] = []

    def describe(self) -> tuple[list[Description], list[Description], bool, set[str], set[str], set[str]]:
        """Parameters, buffers, and whether the parameters have values.

        Also names of parameters that are not to be rounded, of those that are not part of the state dict, and of
        buffers that are not the model's.
        """
        parameters = [
            described(name, parameter, parameter.requires_grad)
            for name, parameter in named_leaves(self._model, remove_duplicate=False)
        ]
        buffers = [
            described(name, buffer, name not in self._buffers.non_persistent) for name, buffer in self._buffers.named
        ]
        buffers += [
            described(name, tensor, False) for name, tensor in zip((PUBLISHED, MODES), self._of_host, strict=True)
        ]
        self._buffer_addresses = list(map(_address, self._buffers.originals))
        # torch computes the batch's statistics in the dtype of these parameters and of the buffers.
        exact = {
            f"{prefix}.{name}" if prefix else name
            for prefix, module in self._model.named_modules(remove_duplicate=False)
            if isinstance(module, torch.nn.modules.batchnorm._NormBase)
            for name in module._parameters
        } | {name for name, _ in self._constants.named}
        return parameters, buffers, self._has_values, exact, self._constants.non_persistent, OF_HOST

    def bind(self, places: list[Place], runner: _native.RunnerSide) -> None:
        self._note_rounding(places)
        self._places = places
        self._leave_home()
        self._constants.note()
        self._runner = runner
        self._gradients = GradientHooks(self._names, self._parameters, runner)

    def read_parameters(self, places: list[Place]) -> None:
        """Makes the model's parameters the master's, for a dataset that computes with the model and writes none."""
        for parameter, (memory, dtype, strides) in zip(self._parameters, places, strict=True):
            parameter.data = tensor_over(memory, dtype, parameter.shape, strides)

    def _note_rounding(self, places: list[Place]) -> None:
        """Finds out whether runners have other dtypes than the host (`runners.parameters: bf16`)."""
        dtypes = [
            (name, parameter.dtype, getattr(torch, dtype))
            for name, parameter, (_, dtype, _) in zip(self._names, self._parameters, places, strict=True)
        ]
        self._rounded = next((one for one in dtypes if one[1] != one[2]), None)

    def seed(self, seed: int) -> None:
        seed_generators(seed)

    def begin_attempt(self) -> None:
        self._losses, self._scalars = [], []
        self._buffers.begin_attempt()
        if self._gradients is not None:
            self._gradients.begin_attempt()

    def call(self) -> None:
        assert self._changes is not None
        self._changes.call()

    def load_parameters(self) -> None:
        """Nothing is to be done where the model's parameters are the master's."""
        self._follow_order()

    def _follow_order(self) -> Order | None:
        """Gives the model the parameters that the step needs: the replica's own in an inner step, else the master's.

        Returns what is asked of an inner step. Raises ModelError if this replica cannot make it.
        """
        self._follow()
        order = self._changes.order if self._changes is not None else None
        if order is None:
            if self._resident is not None:
                self._leave_home()
            self._resident = self._joint = None
            return None
        if self._resident is None or self._order is None or self._order.optimizer != order.optimizer:
            check_made(0, order.made)
            self._check_own()
            self._begin_inner(order)
        assert self._resident is not None
        if order is not self._order:
            self._resident.check(order.made)
            if order.loads:
                self._take_home(self._resident)
            self._order = order
        return order

    def _begin_inner(self, order: Order) -> None:
        optimizer = received(order, self._parameters) if order.sent else OPTIMIZERS[order.optimizer]
        if order.division is not None:
            assert self._runner is not None
            self._joint = JointUpdate(order.division, self._rank, optimizer, self._parameters, self._runner)
        self._resident = Resident.present = Resident(optimizer, self._joint.own if self._joint is not None else None)

    def _check_own(self) -> None:
        """Raises ModelError if the parameters cannot stay with the replica."""
        assert self._runner is not None
        if self._rounded is not None:
            raise ModelError(
                "inner steps need the parameters in their own dtype, but runners.parameters is bf16: they would update "
                f"a rounded copy of '{self._rounded[0]}'"
            )
        if tied := [name for name, (owner, _) in zip(self._names, self._runner.shared, strict=True) if owner >= 0]:
            raise ModelError(
                f"inner steps cannot keep '{tied[0]}', whose memory is that of another parameter: call "
                "optimizer.step() in the host"
            )

    def _take_home(self, resident: Resident) -> None:
        """Makes the optimizer's parameters the replica's own, with the master's values, or the team's shared ones."""
        if self._joint is not None:
            self._joint.take_home()
        else:
            trained = set(map(id, parameters_of(resident.optimizer)))
            for parameter, (memory, dtype, strides) in zip(self._parameters, self._places, strict=True):
                if id(parameter) in trained:
                    parameter.data = tensor_over(memory, dtype, parameter.shape, strides).clone()
        self._have_moved()

    def _leave_home(self) -> None:
        """Makes the model's parameters the master's again."""
        for parameter, (memory, dtype, strides) in zip(self._parameters, self._places, strict=True):
            parameter.data = tensor_over(memory, dtype, parameter.shape, strides)
        self._have_moved()

    def _have_moved(self) -> None:
        aliases.follow(self._model)
        self._addresses = list(map(_address, self._parameters))

    def apply(self, gradients: list[Place | None], scale: float) -> float:
        """Makes the update of a committed inner step. gradients: mean gradients; None for a parameter without one.

        If the list is empty, the mean gradients are the ones that the parameters have kept in this attempt, times
        `scale`. Returns their norm, if it was computed for clipping, or 0.
        """
        order = self._follow_order()
        assert order is not None and self._resident is not None
        if self._joint is not None:
            return self._joint.step(self._resident, order, gradients)
        for parameter, gradient in zip(self._parameters, gradients, strict=False):
            parameter.grad = None
            if gradient is not None:
                memory, dtype, strides = gradient
                mean = tensor_over(memory, dtype, parameter.shape, strides)
                parameter.grad = mean.to(parameter.device, parameter.dtype, copy=True)
        for gradient in map(GRADIENT, self._parameters) if not gradients and scale != 1 else ():
            if gradient is not None and gradient.itemsize == 2:  # As in the reduction: torch would round the scale.
                gradient.copy_(gradient.float().mul_(scale))
            elif gradient is not None:
                gradient.mul_(scale)
        norm = self._step(self._resident, order)
        for parameter in self._parameters:
            parameter.grad = None
        return norm

    def _step(self, resident: Resident, order: Order) -> float:
        return resident.step(order, self._parameters)

    def team_member(self) -> _native.TeamMember | str:
        """Its device's part in teams, or why there is none."""
        return "this device has no part in teams"

    def run(self, fields: list[Field], divisor: float) -> None:
        assert self._gradients is not None
        self._follow_order()
        self._buffers.begin_forward()
        self._gradients.begin_micro_batch()
        loss, scalars = self._loss(self._inputs(fields), divisor)
        self._note(loss, scalars, divisor)
        self._gradients.begin_backward()
        loss.backward()  # type: ignore[no-untyped-call]
        self._gradients.end_backward()

    def _follow(self) -> Change:
        """Makes the changes that the host has made to the model since the last micro-batch."""
        present = bytes(self._published), bytes(self._modes)
        if present == self._followed:
            return Change.NOTHING
        (place, modes), (former, before) = present, self._followed
        made = Change.NOTHING
        if self._changes is not None and place != former:
            made = self._changes.make(place, self._buffers.held())
        if modes != before:
            self._structure.follow(modes, before)
            made = Change.TENSORS
            if self._gradients is not None:
                self._gradients.hook()
        if made is Change.TENSORS:
            self._outside.changed()
        self._followed = present
        return made

    def _loss(self, inputs: Any, divisor: float | torch.Tensor) -> Numbers:
        """The loss of a micro-batch, divided, and the other numbers of the output."""
        with self._autocast_context(), self._outside.watched(inputs, self._warn) as look:
            loss, scalars = read_outputs(self._forward(inputs), self._place)
            look(loss)
            del inputs
            self._check_weight(scalars)
            if loss.dtype is not torch.float64:
                loss = loss.to(torch.float32)
        return self._divided(loss, divisor), scalars

    def _note(self, loss: torch.Tensor, scalars: list[tuple[str, float | torch.Tensor]], divisor: float) -> None:
        """For collect()."""
        self._losses.append(loss.detach())
        self._scalars += [(name, value, 1 / divisor) for name, value in scalars]

    def _check_weight(self, scalars: list[tuple[str, float | torch.Tensor]]) -> None:
        name = self._runner.loss_weight if self._runner is not None else ""
        if name and all(found != name for found, _ in scalars):
            raise ModelError(
                f"loss_scaling is sum_over({name}), but the model's output has no number '{name}'; it has the numbers: "
                f"{', '.join(found for found, _ in scalars) or 'none'}. Return it beside the loss, which is a sum: "
                f"{{'loss': sum, '{name}': number}}"
            )

    def _warn(self, text: str) -> None:
        if self._runner is not None:
            self._runner.warn(text)

    def _autocast_context(self) -> contextlib.AbstractContextManager[Any]:
        dtype = self._autocast_dtype or torch_settings.runner.autocast.get(self._device_type)
        if dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self._device_type, dtype=dtype, cache_enabled=torch.is_autocast_cache_enabled())

    def _divided(self, loss: torch.Tensor, divisor: float | torch.Tensor) -> torch.Tensor:
        return loss.div(divisor).to(loss.dtype)

    def _inputs(self, fields: list[Field]) -> Any:
        if fields[0][0] == PICKLED:
            _, _, (count, size), memory = fields[0]
            rows = memoryview(memory)
            elements = [pickle.loads(element_in(rows[i * size : (i + 1) * size])) for i in range(count)]
            return collated(self._collate_fn, elements)
        # Copies, because a model may write into its batch or keep it, and an attempt may be repeated with the batch.
        return restore_structure(
            [(name, dense_over(memory, dtype, shape).clone()) for name, dtype, shape, memory in fields]
        )

    def _forward(self, inputs: Any) -> Any:
        if self._rounded is not None:
            _, full, rounded = self._rounded
            inputs = mapped(lambda tensor: tensor.to(rounded) if tensor.dtype is full else tensor, inputs)
        try:
            return self._model(inputs) if isinstance(self._model, Objective) else call(self._model, inputs)
        except TypeError as error:
            if isinstance(self._model, Objective) or not WRONG_ARGUMENTS.search(str(error)):
                raise
            raise ModelError(
                f"{describe(error)}\n(forward() was given {_text_of(inputs)}. If the script computes the loss of what "
                "the model returns, pass that too: Manager(model, ..., loss=nn.CrossEntropyLoss()); the model is "
                "called without the targets then)"
            ) from error
        except (RuntimeError, IndexError) as error:
            if type(error) not in (RuntimeError, IndexError):
                raise
            first, line, rest = describe(error).partition("\n")  # An error of torch, which names no tensor.
            raise ModelError(f"{first} (forward() was given {_text_of(inputs)}){line}{rest}") from error

    def collect(self) -> tuple[float, list[tuple[str, float]]]:
        if self._gradients is not None:
            self._gradients.rest()
        for name in self._constants.replaced():
            self.parameter_changed(name)
        self._check()
        for text in self._buffers.check_room():
            self._warn(text)
        return self._totals()

    def parameter_changed(self, name: str) -> None:
        """Called when forward() or backward() has changed a parameter, which is the caller's error to raise, or a
        constant. Of a constant it tells the host, and raises ModelError."""
        if self._tell is not None and name in dict(self._constants.named):
            self._tell({name: CHANGES})
            raise ModelError(f"the model changed its buffer '{name}'")

    def _totals(self) -> tuple[float, list[tuple[str, float]]]:
        # item() only here: each number is read once, after all computation.
        loss = 0.0
        for each in self._losses:  # Not sum(), which rounds differently from Python 3.12 on.
            loss += each.item()
        sums: dict[str, float] = {}
        for name, value, weight in self._scalars:
            number = value.item() if isinstance(value, torch.Tensor) else value
            sums[name] = sums.get(name, 0.0) + float(number) * weight
        return loss, list(sums.items())

    def _check(self) -> None:
        """Raises ModelError unless the parameters still lie in the master's memory, where bind() has put them."""
        self._structure.check()
        if list(map(_address, self._parameters)) == self._addresses:
            return
        for name, parameter, address in zip(self._names, self._parameters, self._addresses, strict=True):
            if parameter.numel() and parameter.data_ptr() != address:
                raise ModelError(
                    f"parameter '{name}' was replaced: it no longer lies in the master's memory (load() or "
                    "set_data()?): gradients of the tensor in its place are lost. Change parameters in place; what "
                    "forward() assigns must not be a parameter"
                )

    def settle(self) -> list[Description] | None:
        """Puts the model's buffers back in place. Returns None, or their descriptions if an address has changed."""
        self._buffers.settle()
        addresses = list(map(_address, self._buffers.originals))
        if addresses == self._buffer_addresses:
            return None
        self._buffers.check_alike()
        self._buffer_addresses = addresses
        tensors = [*self._buffers.originals, *self._of_host]
        return [described("", tensor, False) for tensor in tensors]

    def buffers_loaded(self) -> None:
        """The session's buffers were written to the addresses of describe()."""
        self._buffers.loaded()

    def generator_state(self) -> torch.Tensor:
        return torch.get_rng_state()

    def load_generator(self, state: bytearray) -> None:
        """A state that was saved with another device may be longer: the CPU's generator comes first."""
        own = torch.get_rng_state().numel()
        torch.set_rng_state(torch.frombuffer(state, dtype=torch.uint8)[:own])


def prepare_runner(threads: int, shares_cores: bool, deterministic: bool) -> None:
    """shares_cores: the number of threads is this runner's share, and not one of the configuration."""
    torch.set_num_threads(threads)
    torch_settings.runner.threads = threads if shares_cores else 0
    torch_settings.runner.deterministic = deterministic
    torch_settings.write_deterministic((0, False))


def check_autocast(autocast: str, device: torch.device) -> None:
    """Raises ConfigError if torch's autocast has no such dtype on the device. Otherwise it would only warn."""
    if autocast not in AUTOCAST_DTYPES:
        return
    dtype = AUTOCAST_DTYPES[autocast]
    found: torch.dtype | None = None
    why = "autocast does not cast to it there"
    try:
        with warnings.catch_warnings(), torch.autocast(device.type, dtype=dtype):
            warnings.simplefilter("ignore")
            product = torch.ones(2, 2, device=device) @ torch.ones(2, 2, device=device)
        found = product.cpu().dtype
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
    if found is not dtype:
        raise ConfigError(
            f"runners.autocast is {autocast}, but torch {torch.__version__} does not compute in {dtype} on "
            f"{device.type} ({why}); choose another",
            "runners.autocast",
        )
