# Runs in: the host.
"""Inner steps whose update the session makes, by kernels of its own: for runners that cannot have an optimizer."""

from __future__ import annotations

import logging
from typing import Any

import torch

from accelmgr import _native
from accelmgr._memory.tensors import tensor_over, write
from accelmgr._updates.inner import parameters_of
from accelmgr.errors import UsageError

logger = logging.getLogger("accelmgr")

MOST_GROUPS = 16
KINDS: dict[type, str] = {torch.optim.SGD: "sgd", torch.optim.Adam: "adam", torch.optim.AdamW: "adamw"}

Group = tuple[float, float, float, float, float, float, bool]
Numbers = tuple[str, float, list[Group]]
"""The kind of an optimizer, the norm to which gradients are clipped (0: none), and the numbers of its groups."""


def why_not(optimizer: torch.optim.Optimizer) -> str:
    """Why the session has no kernels for it; empty if it has."""
    if (kind := KINDS.get(type(optimizer))) is None:
        return f"it is a {type(optimizer).__name__}"
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return "it has hooks"
    if len(optimizer.param_groups) > MOST_GROUPS:
        return f"it has more than {MOST_GROUPS} groups"
    for group in optimizer.param_groups:
        for name in ("amsgrad", "maximize", "differentiable"):
            if group.get(name):
                return f"{name} is set"
        if kind == "sgd" and group["momentum"] != 0 and group["dampening"] != 0:
            return "dampening is set"
    return ""


class SessionUpdates:
    """The updates of one optimizer. Its state lies in the session; `optimizer.state` has views of it."""

    def __init__(
        self, handle: _native.Handle, leaves: list[torch.Tensor], optimizer: torch.optim.Optimizer, adopts: bool
    ) -> None:
        """adopts: an optimizer without a state goes on with the one that an earlier host of the service has left."""
        self.handle = handle
        self.optimizer = optimizer
        self._kind = KINDS[type(optimizer)]
        self._leaves = leaves
        self._steps = torch.zeros(len(leaves))
        self._step_of = self._steps.unbind()  # Views: the "step" that torch has of each parameter.
        # _versions() when the session and `optimizer.state` were the same; None: it takes over what the session has.
        self._seen: list[tuple[int, int]] | None = []
        self._groups: list[int | None] = []
        self._find_moments()
        self._place_groups()
        if adopts and not optimizer.state and self._has_left():
            self._note()
        else:
            self._bring()

    def _has_left(self) -> bool:
        """Whether the session has the state of such an optimizer as of the last step."""
        if not any(self.handle.updates()):
            return False
        if self.handle.is_updated and self.handle.moments_used == len(self._names):
            return True
        logger.warning(
            "the optimizer begins with a new state: what an earlier host has left is of another kind of optimizer, "
            "half written, or older than the last step"
        )
        return False

    def _find_moments(self) -> None:
        first, second = (
            [tensor_over(p.memory, p.dtype, p.shape, p.strides) if p is not None else None for p in places]
            for places in self.handle.moments()
        )
        self._moments = {"momentum_buffer": first, "exp_avg": first, "exp_avg_sq": second}

    @property
    def _names(self) -> list[str]:
        """The names of the moments that the optimizer uses."""
        if self._kind != "sgd":
            return ["exp_avg", "exp_avg_sq"]
        return ["momentum_buffer"] if any(group["momentum"] != 0 for group in self.optimizer.param_groups) else []

    def _place_groups(self) -> None:
        """Tells the session to which group each parameter belongs."""
        numbers = {id(leaf): number for number, leaf in enumerate(self._leaves)}
        groups: list[int | None] = [None] * len(self._leaves)
        for index, group in enumerate(self.optimizer.param_groups):
            for parameter in group["params"]:
                if (number := numbers.get(id(parameter))) is None:
                    raise UsageError(
                        f"the optimizer has a tensor of shape {list(parameter.shape)} in group {index} which is not a "
                        "parameter of this manager; make the optimizer from manager.parameters()"
                    )
                if self._moments["exp_avg"][number] is None and parameter.requires_grad:
                    name = self.handle.parameters()[number].name
                    raise UsageError(
                        f"the optimizer's parameter '{name}', in group {index}, was frozen when the manager was "
                        "started: the session cannot update it; call optimizer.step() in the host"
                    )
                groups[number] = index
        if groups != self._groups:
            self._groups = groups
            for number, (group_index, made) in enumerate(zip(groups, self.handle.updates(), strict=True)):
                self.handle.set_update(number, group_index, made)

    def _versions(self) -> list[tuple[int, int]]:
        return [
            (id(value), value._version if isinstance(value, torch.Tensor) else 0)
            for parameter in parameters_of(self.optimizer)
            for value in self.optimizer.state.get(parameter, {}).values()
        ]

    def _bring(self) -> None:
        """Gives the session the state that the optimizer has here."""
        states = [self.optimizer.state.get(leaf, {}) for leaf in self._leaves]
        for state in states:  # Its tensors may be those of the session, which become zeros; a signal handler may raise.
            state |= {name: state[name].clone() for name in self._names if state.get(name) is not None}
        self.handle.clear_moments(len(self._names))
        for number, state in enumerate(states):
            held = [name for name in self._names if state.get(name) is not None]
            for name in held:
                if (moment := self._moments[name][number]) is not None:
                    write(moment, state[name])
            self.handle.set_update(number, self._groups[number], int(state.get("step", len(held))))
        self.handle.use_moments(len(self._names))
        self._note()

    def _note(self) -> None:
        """Makes the optimizer's state here views of the session's."""
        self._seen = None
        try:
            self._take_state()
        except BaseException:  # A signal handler has raised: what is half there must not go back.
            self._take_state()
            raise

    def _take_state(self) -> None:
        updates = self.handle.updates()
        self._steps.copy_(torch.tensor(updates, dtype=torch.float32))
        for number, (leaf, made, group) in enumerate(zip(self._leaves, updates, self._groups, strict=True)):
            if made == 0 or group is None:
                continue
            state: dict[str, Any] = self.optimizer.state[leaf]
            if self._kind != "sgd":
                state["step"] = self._step_of[number]
            for name in self._names:
                state[name] = self._moments[name][number]
        self._seen = self._versions()

    def release(self) -> None:
        """Gives the optimizer's state memory of its own: the session's memory is for another optimizer."""
        self.sync()
        for parameter in parameters_of(self.optimizer):
            state = self.optimizer.state.get(parameter, {})
            for name in ("step", *self._names):
                if isinstance(value := state.get(name), torch.Tensor):
                    state[name] = value.clone()

    def sync(self) -> None:
        """Makes the optimizer's state here views of the session's, unless the host has written it since."""
        if self._seen is None or self._versions() == self._seen:
            self._note()

    def numbers(self, clip_grad_norm: float | None) -> Numbers:
        """What the session is to do in the next step."""
        if reason := why_not(self.optimizer):
            raise refusal(self.optimizer, reason, "")
        if clip_grad_norm is not None and not clip_grad_norm > 0:
            raise UsageError(f"clip_grad_norm is {clip_grad_norm}; it must be above 0, or None for no clipping")
        self._place_groups()
        if self._seen is None:
            self._note()
        if self._versions() != self._seen or self.handle.moments_used != len(self._names):
            self._bring()
        return self._kind, float(clip_grad_norm or 0), [_numbers(group) for group in self.optimizer.param_groups]

    def counted(self) -> None:
        """Called when a step was committed, and with it an update."""
        self._note()
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # A scheduler looks whether it has stepped.


def _numbers(group: dict[str, Any]) -> Group:
    beta1, beta2 = map(float, group.get("betas", (0.0, 0.0)))
    momentum, epsilon = float(group.get("momentum", 0.0)), float(group.get("eps", 0.0))
    return (
        float(group["lr"]),
        float(group["weight_decay"]),
        momentum,
        beta1,
        beta2,
        epsilon,
        bool(group.get("nesterov")),
    )


def refusal(optimizer: torch.optim.Optimizer, reason: str, runners: str) -> UsageError:
    """reason: of why_not(). runners: why they cannot have the optimizer."""
    return UsageError(
        (f"runners cannot have the optimizer, because {runners}. " if runners else "")
        + "The session itself makes updates of SGD, Adam and AdamW of torch.optim, without amsgrad, maximize, "
        f"dampening and hooks, but not those of this {type(optimizer).__name__}: {reason}. Call optimizer.step() in "
        "the host"
    )
