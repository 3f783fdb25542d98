# Runs in: the host.
"""The host's model, bound to the memory of a session."""

from __future__ import annotations

import copy
import itertools
import logging
from typing import cast

import torch

from accelmgr import _native
from accelmgr._changes.buffers import FORMS, KEPT
from accelmgr._changes.grown_buffers import Forms
from accelmgr._changes.model_changes import Changes, Structure
from accelmgr._changes.record import Record
from accelmgr._host.master import Master, check_on_cpu
from accelmgr._host.optimizers import check_kind
from accelmgr._host.weights import Weights
from accelmgr._memory.placement import private_copies
from accelmgr._memory.tensors import addressed, named_tensors
from accelmgr._model import aliases
from accelmgr._model.constants import CHANGES, Constants
from accelmgr._model.session_tensors import leaves_of, named_leaves
from accelmgr.errors import ModelError, UsageError

logger = logging.getLogger("accelmgr")


class Binding:
    """Makes the parameters of a session those of the host's model. A built-in model gets parameters of its own.

    It exists as soon as the session holds the initial values.
    """

    def __init__(
        self,
        handle: _native.Handle,
        model: torch.nn.Module | None,
        keeps_zeros: bool,
        record: Record | None,
        grown: Forms,
    ) -> None:
        """keeps_zeros: gradients are never None, but zero. record: if there is a model. grown: see Buffers."""
        self._record = record
        self._grown = grown
        self._handle = handle
        self._model = model
        self._changes: Changes | None = None
        self._structure: Structure | None = None
        self._not_kept: list[str] = []
        self._replacements = 0
        self.master = Master(handle, keeps_zeros)
        self._constants: Constants | None = None
        if model is not None:
            self._structure = Structure(model)
            self._constants = Constants(model)
            by_name = dict(named_leaves(model, remove_duplicate=False))
            self._leaves = [by_name[name] for name, _ in self.master.parameters]
        else:
            self._leaves = [torch.nn.Parameter(tensor) for _, tensor in self.master.parameters]
        self._former_gradients = [leaf.grad for leaf in self._leaves]

    def bind(self, needs_values: bool, weights: Weights | None) -> None:
        """Moves the parameters into the session. See Master.bind()."""
        self.master.bind(self._leaves, needs_values, weights)
        if self._constants is not None:
            self._constants.note()

    def leave(self) -> None:
        """Gives the model memory of its own again, with the present values and gradients.

        The gradients are the former ones if the start has failed. May be called again after an exception.
        """
        gradients = self._former_gradients or self.master.own_gradients()
        self.find_aliases()
        copies = private_copies([leaf.data for leaf in self._leaves], expanded=True)
        # No signal handler raises in map(): tensors that share memory go on sharing it.
        list(map(setattr, self._leaves, itertools.repeat("data"), copies))
        list(map(setattr, self._leaves, itertools.repeat("grad"), gradients))
        aliases.follow(self._model)
        aliases.forget(self._model)

    def find_aliases(self) -> None:
        """See aliases.find()."""
        if self._model is not None:
            aliases.find(self._model, self._leaves, [tensor for _, tensor in self.master.parameters])

    def started(self) -> None:
        """From now on changes of the model are found."""
        self.master.begin(self._former_gradients)
        self._former_gradients = []
        if self._model is not None and self._structure is not None and self._record is not None:
            self._changes = Changes(self._model, self._structure, self._record, self._grown, self._handle)

    def begin_again(self) -> None:
        """Called when new processes begin, which know the modules that the model has now."""
        if self._model is not None and self._structure is not None and self._record is not None:
            written = self._changes.written() if self._changes is not None else set()
            self._structure = Structure(self._model, self._structure.places)
            self._changes = Changes(self._model, self._structure, self._record, self._grown, self._handle, written)

    def changing(self) -> Forms:
        """Constants in whose place the host has put another tensor."""
        return dict.fromkeys(self._constants.replaced(), CHANGES) if self._constants is not None else {}

    def check_buffers(self) -> None:
        """Raises ModelError if the model has other buffers than the session."""
        if self._structure is not None:
            self._structure.check_buffers()

    def check(self, takes_gradients: bool = True) -> None:
        """Raises ModelError unless the parameters are the session's; takes over what was done to `.grad`."""
        if self._structure is not None:
            self._structure.check()
        self.master.look_after(takes_gradients)

    def leaves(self) -> list[torch.Tensor]:
        """The parameters, in the master's order."""
        return self._leaves

    def parameters(self) -> list[torch.nn.Parameter]:
        """In the order of `model.parameters()`; of a built-in model in the master's."""
        if self._structure is None:
            return cast(list[torch.nn.Parameter], self._leaves)
        self._structure.check()
        return list(self._structure.parameters)

    def gradients(self, exact: bool = False) -> list[torch.Tensor]:
        """In the order of parameters(). exact: in the master's dtype."""
        named = self.master.exact_gradients() if exact else self.master.gradients
        gradients = [gradient for _, gradient in named]
        if self._structure is None:
            return gradients
        self.check()
        by_leaf = dict(zip(map(id, self._leaves), gradients, strict=True))
        return [
            # A quantized parameter is not a leaf itself: its leaves are inside.
            by_leaf.get(id(parameter), torch.zeros(()).expand(parameter.shape))
            for parameter in self._structure.parameters
        ]

    def update(self, values: list[torch.Tensor]) -> None:
        """Replaces all parameters, in the order of parameters(), or raises ModelError."""
        ordered = self.parameters()
        if len(values) != len(ordered):
            raise ModelError(
                f"update_model_parameters: got {len(values)} tensors for {len(ordered)} parameters; nothing was changed"
            )
        by_leaf: dict[int, torch.Tensor] = {}
        named = self.master.parameters if self._model is None else self._model.named_parameters()
        for (name, _), own, value in zip(named, ordered, values, strict=True):
            leaves, parts = leaves_of(own), leaves_of(value)
            if own.is_quantized and not torch.equal(own, value):
                raise ModelError(
                    f"update_model_parameters: quantized parameter '{name}' cannot change; nothing was changed"
                )
            if len(leaves) != len(parts):
                raise ModelError(
                    f"update_model_parameters: a {type(value).__name__} was passed for '{name}', a "
                    f"{type(own).__name__}; nothing was changed"
                )
            by_leaf |= {id(leaf): part for (_, leaf), (_, part) in zip(leaves, parts, strict=True)}
        self.master.update([by_leaf.get(id(leaf), leaf) for leaf in self._leaves])

    def send_changes(self, everything: bool = False) -> None:
        """Sends what has changed to the runners. everything: all buffers."""
        if self._changes is None:
            return
        if not (changes := self._changes.take(everything)):
            return
        for name, tensor in changes:
            check_on_cpu("update_buffers", name, tensor)
        dense = [(name, tensor.contiguous().resolve_conj().resolve_neg()) for name, tensor in changes]
        self._handle.update_buffers(addressed(dense))
        self._changes.told(changes)

    def show(self, counted: bool, overwritten: bool) -> None:
        """After a step: the model has its gradients, and, if it counted, its buffers."""
        self.master.show(overwritten)
        if counted and self._changes is not None:
            self._changes.take_in()
            self._tell_of_loss(self._changes.not_kept())

    def _tell_of_loss(self, not_kept: list[str]) -> None:
        """Warns if a runner was replaced that had values in attributes which the session did not have."""
        before, self._not_kept = self._not_kept, not_kept
        if not before and not not_kept:
            return
        count, self._replacements = self._replacements, self._handle.statistics(memory=False).replacements
        if before and self._replacements != count:
            logger.warning(
                "a runner has taken the place of another without what that had in attribute '%s' of the model: "
                "forward() had given it another shape or type than in the first step, and only what has that shape is "
                "kept. Losses differ from now on if the model reads it",
                "', '".join(before),
            )

    def buffers(self) -> dict[str, torch.Tensor]:
        """Copies of the buffers of the last committed step."""
        buffers = dict(named_tensors(self._handle.buffers()))
        for name in (FORMS, KEPT):
            buffers.pop(name, None)
        if self._constants is not None:
            buffers |= {name: tensor.clone() for name, tensor in self._constants.named}
        return buffers

    def sync_buffers(self) -> None:
        """Copies the buffers of the last committed step into those of the model."""
        if self._changes is not None:
            self._changes.sync()

    def state_dict(self) -> dict[str, torch.Tensor]:
        saved = self.master.state_dict(self.buffers())
        if self._model is None:
            return saved
        own = self._model.state_dict()  # For its order, and for further entries (get_extra_state()).
        return {name: saved[name] if name in saved else copy.deepcopy(value) for name, value in own.items()}

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Raises UsageError for an optimizer that would train these parameters wrongly or not at all."""
        groups = getattr(optimizer, "param_groups", None)
        if groups is None:
            raise UsageError(
                f"check_optimizer: a {type(optimizer).__name__} has no param_groups; pass an optimizer of torch.optim, "
                "or a hivemind.Optimizer"
            )
        check_kind(optimizer, self._handle.keeps_last_step)
        self.check()
        own = {tensor.data_ptr() for _, tensor in self.master.parameters}
        for index, group in enumerate(groups):
            for parameter in group["params"]:
                if parameter.numel() and not parameter.is_quantized and parameter.data_ptr() not in own:
                    raise UsageError(
                        f"the optimizer has a tensor of shape {list(parameter.shape)} in group {index} which is not "
                        "a parameter of this manager; make the optimizer from manager.parameters()"
                    )
