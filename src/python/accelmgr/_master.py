"""The master's parameters and gradients as tensors of the host, and the model's parameters that are bound to them."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch

from accelmgr import _native
from accelmgr._memory import dtype_name, tensor_over
from accelmgr.errors import ModelError

Named = list[tuple[str, torch.Tensor]]

_address = torch.Tensor.data_ptr
_gradient = operator.attrgetter("grad")
_requires_grad = operator.attrgetter("requires_grad")


def _tensors(places: Sequence[_native.Place]) -> Named:
    return [(place.name, tensor_over(place.memory, place.dtype, place.shape, place.strides)) for place in places]


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


class Master:
    """Views of the session, in the manifest's order. The session stays mapped as long as a view lives."""

    def __init__(self, handle: _native.Handle) -> None:
        self._handle = handle
        self.parameters = _tensors(handle.parameters())
        self.gradients = _tensors(handle.gradients())
        self._gradients = [gradient for _, gradient in self.gradients]
        # To find moved tensors: share_memory_() moves a storage out of the session, with all tensors over it.
        self._parameter_places = [tensor.data_ptr() for _, tensor in self.parameters]
        self._gradient_places = [tensor.data_ptr() for tensor in self._gradients]
        self._leaves: list[torch.nn.Parameter] = []

    def bind(self, leaves: list[torch.nn.Parameter]) -> None:
        """Makes `leaves` the master's parameters: moves their memory and `.grad` into the session."""
        for leaf, (_, parameter), gradient in zip(leaves, self.parameters, self._gradients, strict=True):
            leaf.data = parameter
            leaf.grad = gradient if leaf.requires_grad else None
        self._leaves = leaves
        self._note()

    def _note(self) -> None:
        self._found = list(map(_gradient, self._leaves))
        self._required = list(map(_requires_grad, self._leaves))

    def look_after(self) -> None:
        """Puts gradients back that the caller has set to None, as zeros, which `zero_grad(set_to_none=True)` means.

        Sets the gradient of a frozen parameter to None, as in plain torch. Raises ModelError for a parameter that no
        longer lies in the master's memory, and for a gradient that is another tensor.
        """
        leaves = self._leaves
        if (
            all(map(operator.is_, map(_gradient, leaves), self._found))
            and list(map(_address, leaves)) == self._parameter_places
            and list(map(_address, self._gradients)) == self._gradient_places
            and list(map(_requires_grad, leaves)) == self._required
        ):
            return
        for index, leaf in enumerate(leaves):
            if leaf.numel():  # A parameter without elements has no address.
                self._look_after(index, leaf)
        self._note()

    def _look_after(self, index: int, leaf: torch.nn.Parameter) -> None:
        if leaf.data_ptr() != self._parameter_places[index]:
            raise ModelError(
                f"the memory of parameter '{self.parameters[index][0]}' was replaced (by to(), share_memory(), "
                "load_state_dict(assign=True) or tie_weights(), for instance): runners do not see what is "
                "written there. Change parameters in place, or with update_model_parameters()"
            )
        gradient = leaf.grad
        own = gradient is not None and gradient.data_ptr() == self._gradient_places[index]
        if own and leaf.requires_grad:
            return
        if gradient is not None and not own:
            raise ModelError(
                f"the gradient of parameter '{self.parameters[index][0]}' is not the manager's tensor; change it in "
                "place"
            )
        if not own and not leaf.requires_grad:
            return
        self._gradients[index].zero_()
        leaf.grad = None if own else self._gradients[index]

    def update(self, values: list[torch.Tensor]) -> None:
        """Replaces all parameters. Raises ModelError, before it writes anything, if one does not fit."""
        for (name, current), value in zip(self.parameters, values, strict=True):
            check_replacement("update_model_parameters", name, current, value)
        self._handle.begin_writing()
        try:
            for (_, current), value in zip(self.parameters, values, strict=True):
                current.copy_(value)
        finally:
            self._handle.end_writing()

    def state_dict(self, buffers: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copies of the parameters, and the persistent ones of `buffers`; tied tensors under each of their names."""
        saved: dict[str, torch.Tensor] = {}
        for name, aliases in self._handle.persistent_buffers():
            saved |= dict.fromkeys((name, *aliases), buffers[name])
        for place, (name, parameter) in zip(self._handle.parameters(), self.parameters, strict=True):
            saved |= dict.fromkeys((name, *place.aliases), parameter.clone())
        return saved
