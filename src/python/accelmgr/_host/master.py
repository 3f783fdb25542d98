# Runs in: the host.
"""The master's parameters and gradients as tensors of the host, and the model's parameters that are bound to them."""

from __future__ import annotations

import contextlib
import operator
from collections import Counter
from collections.abc import Sequence

import torch

from accelmgr import _native
from accelmgr._host.weights import Weights
from accelmgr._memory.tensors import (
    dtype_name,
    is_expanded,
    is_private,
    storage_of,
    stored,
    tensor_over,
    users_of,
    write,
)
from accelmgr.errors import ModelError

Named = list[tuple[str, torch.Tensor]]

_address = torch.Tensor.data_ptr
_gradient = operator.attrgetter("grad")


def check_on_cpu(call: str, name: str, value: torch.Tensor) -> None:
    if value.device.type != "cpu" or value.layout != torch.strided:
        raise ModelError(
            f"{call}: the tensor for '{name}' is on {value.device}, {value.layout}; it must be dense and on the CPU; "
            "nothing was changed"
        )


def check_replacement(call: str, name: str, current: torch.Tensor, value: torch.Tensor) -> None:
    """Raises ModelError unless `value` can be copied over `current`, the tensor of this name."""
    if value.shape != current.shape or value.dtype != current.dtype:
        raise ModelError(
            f"{call}: '{name}' is {dtype_name(current.dtype)} {list(current.shape)}, but the tensor passed for it "
            f"is {dtype_name(value.dtype)} {list(value.shape)}; nothing was changed"
        )
    check_on_cpu(call, name, value)
    if is_expanded(current) and not torch.equal(stored(value, current).expand(value.shape), value):
        raise ModelError(
            f"{call}: '{name}' is expanded (many of its elements are one in memory), but they differ in the tensor "
            "passed for it; nothing was changed"
        )


class Master:
    """Views of the session, in the manifest's order. The session stays mapped as long as a view lives.

    The `.grad` of a leaf is the master's gradient, or None if no step has given it one since it was zeroed: then an
    optimizer leaves it alone, as in plain PyTorch. With `gradients.dtype: float32`, the `.grad` of a leaf of 16 bits is
    a rounded copy of it.
    """

    def __init__(self, handle: _native.Handle, keeps_zeros: bool) -> None:
        """keeps_zeros: `.grad` is never None, but zero."""
        self._handle = handle
        self._keeps_zeros = keeps_zeros
        places = handle.parameters()
        self.parameters: Named = [
            (place.name, tensor_over(place.memory, place.dtype, place.shape, place.strides)) for place in places
        ]
        self._not_saved = {place.name for place in places if not place.persistent}
        self.gradients: Named = []
        self._exact: dict[int, torch.Tensor] = {}  # The master's gradients, where `.grad` is a rounded copy.
        self._find_gradients()
        # To find moved tensors: share_memory_() moves a storage out of the session, with all tensors over it.
        self._parameter_places = [tensor.data_ptr() for _, tensor in self.parameters]
        self._leaves: list[torch.Tensor] = []
        self._frozen_versions: list[tuple[int, int]] = []

    def _find_gradients(self) -> None:
        gradients: Named = []
        frozen: list[int] = []
        exact: dict[int, torch.Tensor] = {}
        for (name, parameter), place in zip(self.parameters, self._handle.gradients(), strict=True):
            index = len(gradients)
            gradient = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)  # Without memory.
            if place is None:
                frozen.append(index)
            else:
                gradient = tensor_over(place.memory, place.dtype, place.shape, place.strides)
            if gradient.dtype != parameter.dtype:
                exact[index] = gradient
                gradient = self.gradients[index][1] if index in self._exact else gradient.to(parameter.dtype)
            gradients.append((name, gradient))
        tensors = [gradient for _, gradient in gradients]
        places = [tensor.data_ptr() for tensor in tensors]
        # Together: a signal handler may raise before.
        self.gradients, self._gradients, self._gradient_places = gradients, tensors, places
        self._frozen, self._exact = frozen, exact  # The session has no gradient of the frozen ones.
        self._round()

    def _round(self) -> None:
        """Makes the rounded copies again."""
        for index, exact in self._exact.items():
            write(self._gradients[index], exact)
        self._versions = [self._gradients[index]._version for index in self._exact]

    def _take_copies(self) -> None:
        """Takes over what the caller has written into rounded copies."""
        for (index, exact), version in zip(self._exact.items(), self._versions, strict=True):
            if self._gradients[index]._version != version:
                write(exact, self._gradients[index])
        self._versions = [self._gradients[index]._version for index in self._exact]

    def exact_gradients(self) -> Named:
        """The master's gradients, in the manifest's order."""
        return [(name, self._exact.get(index, gradient)) for index, (name, gradient) in enumerate(self.gradients)]

    def _unfreeze(self) -> bool:
        """Makes gradients for parameters that were frozen and require one now. Returns whether there are any."""
        unfrozen = [index for index in self._frozen if self._leaves[index].requires_grad]
        if unfrozen:
            for index in unfrozen:
                self._found[index] = None  # What the caller has put there is looked after now.
            self._lacks = True
            self._handle.unfreeze(unfrozen)
            self._find_gradients()
        return bool(unfrozen)

    def _tell_of_writes(self) -> None:
        """Devices get frozen parameters again only when they were written."""
        versions = [(self._leaves[index]._version, self.parameters[index][1]._version) for index in self._frozen]
        if versions != self._frozen_versions:
            self._handle.frozen_written()
            self._frozen_versions = versions

    def bind(self, leaves: list[torch.Tensor], needs_values: bool, weights: Weights | None) -> None:
        """Makes `leaves` the master's parameters: moves their memory into the session, one after the other.

        needs_values: copies their values, too; otherwise the session has values of a checkpoint. weights: has the
        values to copy, in place of the leaves.
        """
        for leaf, (name, parameter) in zip(leaves, self.parameters, strict=True):
            leaf.grad = None
            if needs_values or name in self._not_saved:
                own = leaf.detach()
                stored(parameter).copy_(stored(own if weights is None else weights.value(name, own), parameter))
            leaf.data = parameter
        self._leaves = leaves

    def begin(self, former: Sequence[torch.Tensor | None]) -> None:
        """Called when the session has gradients. former: what `.grad` was before bind(); steps add to it."""
        self._note()
        self.show(everything=True)
        for leaf, gradient in zip(self._leaves, former, strict=True):
            if gradient is not None:
                leaf.grad = gradient
        self.look_after()

    def own_gradients(self) -> list[torch.Tensor | None]:
        """The `.grad` of the leaves, copied if it lies in the session."""
        return [
            leaf.grad.clone() if leaf.grad is not None and leaf.grad.data_ptr() == place else leaf.grad
            for leaf, place in zip(self._leaves, self._gradient_places, strict=True)
        ]

    def _note(self) -> None:
        self._found = list(map(_gradient, self._leaves))
        self._lacks = any(gradient is None for gradient in self._found)

    @property
    def is_empty(self) -> bool:
        """Whether every `.grad` is None: no step has given one since they were zeroed."""
        return self._lacks and not self._keeps_zeros and all(gradient is None for gradient in self._found)

    def show(self, everything: bool = False) -> None:
        """After a step: sets `.grad` of the parameters that it used. everything: it has overwritten all gradients."""
        if self._exact:
            self._round()
        if not everything and not self._lacks:
            return
        touched = b"\1" * len(self._leaves) if self._keeps_zeros else self._handle.touched()
        for leaf, found, gradient, has_one in zip(self._leaves, self._found, self._gradients, touched, strict=True):
            if has_one and found is None and (leaf.requires_grad or not self._keeps_zeros):
                leaf.grad = gradient
            elif everything and not has_one:
                leaf.grad = None
        self._note()

    def look_after(self, takes_gradients: bool = True) -> None:
        """Makes the master's gradients what the caller has made of `.grad`: None is zero, another tensor is copied.

        takes_gradients: False: they stay as they are, since runners may read them.

        Raises ModelError for a parameter that no longer lies in the master's memory, and for a gradient that is part of
        other memory.
        """
        if self._exact and takes_gradients:
            self._take_copies()
        self._take_gradients(takes_gradients)
        if self._frozen:
            if self._unfreeze():
                self._take_gradients(takes_gradients)
            self._tell_of_writes()

    def _take_gradients(self, takes: bool = True) -> None:
        leaves = self._leaves
        if (
            all(map(operator.is_, map(_gradient, leaves), self._found))
            and list(map(_address, leaves)) == self._parameter_places
            and list(map(_address, self._gradients)) == self._gradient_places
        ):
            return
        dropped: list[int] = []
        written: list[tuple[int, torch.Tensor]] = []
        places = zip(map(_address, leaves), self._parameter_places, strict=True)
        moved = [index for index, (now, place) in enumerate(places) if now != place and leaves[index].numel()]
        self._take_parameters(moved)
        for index, leaf in enumerate(leaves):
            if self._gradients[index].data_ptr() != self._gradient_places[index]:
                raise ModelError(
                    f"the memory of the gradient of parameter '{self.parameters[index][0]}' was replaced (by "
                    "share_memory_(), for instance): runners do not write there"
                )
            gradient = leaf.grad
            if index in self._frozen:
                continue
            if gradient is None:
                if self._found[index] is not None:
                    dropped.append(index)
            elif leaf.numel() and gradient.data_ptr() != self._gradient_places[index]:
                self._check_own(index, gradient)
                written.append((index, gradient))
        if not takes:
            return
        self._zero(dropped)
        for index, gradient in written:
            write(self._gradients[index], gradient)
            if index in self._exact:
                write(self._exact[index], gradient)
        if dropped:
            self._handle.set_touched(dropped, False)
        if written:
            self._handle.set_touched([index for index, _ in written], True)
        for index, _ in written:  # Last: what a signal handler ends before is done again.
            leaves[index].grad = self._gradients[index]
        for index in dropped if self._keeps_zeros else ():
            leaves[index].grad = self._gradients[index] if leaves[index].requires_grad else None
        self._note()

    def _take_parameters(self, moved: list[int]) -> None:
        """Takes the values of tensors that the caller has assigned to `.data`.

        Raises ModelError if another tensor uses such memory, or what it has replaced: it would have other values then.
        """
        users = Counter(storage_of(self._leaves[index]) for index in moved if self._leaves[index].device.type == "cpu")
        for index in moved:
            leaf, (name, parameter) = self._leaves[index], self.parameters[index]
            alike = (leaf.device, leaf.dtype, leaf.shape, leaf.stride()) == (
                *(parameter.device, parameter.dtype, parameter.shape, parameter.stride()),
            )
            own = alike and is_private(leaf) and users_of(leaf) == users[storage_of(leaf)] and users_of(parameter) == 1
            if not own:
                raise ModelError(
                    f"the memory of parameter '{name}' was replaced (by to(), share_memory(), tie_weights(), or that "
                    "of a tensor which others share, for instance): runners do not see what is written there. Change "
                    "parameters in place, assign a clone() to `.data`, or call manager.rebind()"
                )
        with self._handle.writing() if moved else contextlib.nullcontext():
            for index in moved:
                leaf, parameter = self._leaves[index], self.parameters[index][1]
                stored(parameter).copy_(stored(leaf.detach(), parameter))
                leaf.data = parameter
                torch.autograd.graph.increment_version(leaf)

    def _check_own(self, index: int, gradient: torch.Tensor) -> None:
        if gradient._is_view() or (
            gradient.layout is torch.strided and gradient.untyped_storage().nbytes() > (gradient.nbytes)
        ):
            raise ModelError(
                f"the gradient of parameter '{self.parameters[index][0]}' is part of other memory, which the manager "
                "does not write; copy it into the gradient that is there, or assign a tensor of its own"
            )

    def _zero(self, dropped: list[int]) -> None:
        if len(dropped) == len(self._leaves):
            self._handle.zero_grad()
            self._round()
            return
        for index in dropped:
            self._gradients[index].zero_()
            if index in self._exact:
                self._exact[index].zero_()

    def zero(self, set_to_none: bool) -> None:
        """Zeroes all gradients. set_to_none: `.grad` is None until a step gives a gradient."""
        self._handle.zero_grad()
        if self._exact:
            self._round()
        if set_to_none:
            for leaf in self._leaves:
                leaf.grad = None
            self._note()

    def update(self, values: list[torch.Tensor]) -> None:
        """Replaces all parameters. Raises ModelError, before it writes anything, if one does not fit."""
        for (name, current), value in zip(self.parameters, values, strict=True):
            check_replacement("update_model_parameters", name, current, value)
        with self._handle.writing():
            for (_, current), value in zip(self.parameters, values, strict=True):
                stored(current).copy_(stored(value, current))

    def state_dict(self, buffers: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copies of the parameters, and the persistent ones of `buffers`; tied tensors under each of their names."""
        saved: dict[str, torch.Tensor] = {}
        for name, aliases in self._handle.persistent_buffers():
            saved |= dict.fromkeys((name, *aliases), buffers[name])
        for place, (name, parameter) in zip(self._handle.parameters(), self.parameters, strict=True):
            saved |= dict.fromkeys((name, *place.aliases), parameter.clone())
        return saved
