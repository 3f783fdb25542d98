"""Compares runners with plain autograd in this process: same elements, same order of sums, same seeds.

Both divide each loss by the number of micro-batches times the number of runners. Both add gradients in the order of
micro-batches, then in the order of ranks; those of 16 bits of several ranks in float32, rounded once. With one thread
the bits must therefore be the same.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from launching import START_METHOD
from oracle import call, loss_of
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

import accelmgr
from accelmgr._host.arguments import TRAINABLE

TOLERANCE = 2e-4  # Relative to the norm of the gradient.
SEED = 7
HALVES = (torch.bfloat16, torch.float16)

torch.set_num_threads(1)
torch.set_deterministic_debug_mode("warn")  # As runners do; use_deterministic_algorithms() imports torch's compiler.

Gradients = dict[str, torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Shape:
    """How many runners a step has, and how many micro-batches each runs."""

    runners: int = 1
    accumulation: int = 1

    @property
    def elements(self) -> int:
        return self.runners * self.accumulation


def trainable(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Parameters of which there can be gradients, frozen ones included."""
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.dtype in TRAINABLE]


class Plain:
    """Plain PyTorch with a replica and a generator state for each rank. The replicas step one after the other."""

    def __init__(self, replicas: Sequence[nn.Module], shape: Shape) -> None:
        assert len(replicas) == shape.runners
        self.replicas, self._shape = list(replicas), shape
        self._states = []
        with torch.random.fork_rng(devices=[]):
            for rank in range(shape.runners):
                torch.manual_seed(SEED + rank)
                self._states.append(torch.get_rng_state())
        self.gradients: Gradients = {}

    def step(self, elements: Sequence[Any], accumulate: bool) -> float:
        """Makes a step in which rank i % runners has element i. Returns the mean loss."""
        mean: Gradients = {}
        loss = 0.0
        for rank, replica in enumerate(self.replicas):
            with torch.random.fork_rng(devices=[]):
                torch.set_rng_state(self._states[rank])
                own, own_loss = self._rank(replica, elements[rank :: self._shape.runners])
                self._states[rank] = torch.get_rng_state()
            loss += own_loss
            for name, gradient in own.items():
                gradient = gradient.float() if gradient.dtype in HALVES else gradient
                mean[name] = mean[name] + gradient if name in mean else gradient
        for name, parameter in trainable(self.replicas[0]):
            gradient = mean.get(name, torch.zeros_like(parameter))
            before = self.gradients.get(name, torch.zeros_like(parameter))
            self.gradients[name] = (before + gradient if accumulate else gradient).to(parameter.dtype)
        return loss

    def _rank(self, replica: nn.Module, elements: Sequence[Any]) -> tuple[Gradients, float]:
        sparse: Gradients = {}  # Runners sum sparse gradients as dense tensors; so does this.
        total = 0.0
        replica.zero_grad()
        for element in elements:
            loss = loss_of(call(replica, torch.utils.data.default_collate([element]))) / self._shape.elements
            loss.backward()
            total += loss.item()
            for name, parameter in replica.named_parameters():
                if parameter.grad is not None and parameter.grad.is_sparse:
                    gradient = parameter.grad.to_dense()
                    sparse[name] = sparse[name] + gradient if name in sparse else gradient
                    parameter.grad = None
        dense = {name: parameter.grad for name, parameter in replica.named_parameters() if parameter.grad is not None}
        return {**dense, **sparse}, total

    def take_parameters(self, model: nn.Module) -> None:
        """Copies the model's parameters into all replicas."""
        with torch.no_grad():
            for replica in self.replicas:
                for own, value in zip(replica.parameters(), model.parameters(), strict=True):
                    own.copy_(value)


def assert_gradients(ours: Gradients, plain: Gradients, exact: bool, where: str) -> None:
    assert ours.keys() == plain.keys()
    wrong = []
    for name, expected in plain.items():
        found, norm = ours[name], expected.norm().item()
        distance = (found - expected).norm().item()
        if not distance <= TOLERANCE * norm:
            wrong.append(f"{name} {list(expected.shape)} is off by {distance:.3g}; its norm is {norm:.3g}")
        elif exact and not torch.equal(found, expected):
            wrong.append(f"{name} {list(expected.shape)} has other bits; off by {distance:.3g} of {norm:.3g}")
    assert not wrong, f"{where}: {len(wrong)} of {len(plain)} gradients are wrong:\n  " + "\n  ".join(wrong[:20])


def gradients_of(manager: accelmgr.Manager) -> Gradients:
    assert manager.model is not None
    names = [name for name, _ in manager.model.named_parameters()]
    gradients = dict(zip(names, manager.get_aggregated_gradients(), strict=True))
    return {name: gradients[name] for name, _ in trainable(manager.model)}


@contextlib.contextmanager
def started(model: Any, elements: Any, shape: Shape, start_method: str, **options: Any) -> Iterator[Any]:
    """Starts a manager that must compute the same as Plain."""
    fixed: dict[str, Any] = {
        "nprocs": shape.runners,
        "batch_size_per_device": 1,
        "grad_accumulation_steps": shape.accumulation,
        "seed_base": SEED,
        "runners__threads": 1,
        "runners__on_loss": "fail",
    }
    with accelmgr.Manager(model, elements, start_method=start_method, **{**fixed, **options}) as manager:
        yield manager


Factory = Callable[[], nn.Module]


def compare(
    model: nn.Module | Factory,
    *,
    shape: Shape = Shape(),
    start_method: str = START_METHOD,
    factory: bool = False,
    accumulate: Sequence[bool] = (True, True, False),
    exact: bool = True,
    make_element: Callable[[int], Any] = torch.tensor,
    kills: bool = False,
    **options: Any,
) -> None:
    """Steps a manager and plain autograd side by side and compares gradients and loss after each step.

    `accumulate` has one value for each step. Parameters change between steps. Each side has copies of `model`, or
    calls it if it is a function, which suits a model that loses something in a copy, such as hooks on parameters. With
    `factory` the manager gets the function itself. kills: rank 0 is killed before each step but the first.
    """
    make: Factory = functools.partial(copy.deepcopy, model) if isinstance(model, nn.Module) else model
    plain = Plain([make() for _ in range(shape.runners)], shape)
    elements = [make_element(i) for i in range(shape.elements * len(accumulate))]
    if kills:
        options = {"runners__on_loss": "restart", **options}
    with started(make if factory else make(), elements, shape, start_method, **options) as manager:
        for step, adds in enumerate(accumulate):
            if kills and step > 0:
                os.kill(manager.statistics().runners[0].pid, signal.SIGKILL)
            result = manager.step(accumulate=adds)
            result.raise_for_status()
            loss = plain.step(elements[step * shape.elements : (step + 1) * shape.elements], adds)
            where = f"{start_method}, {shape}, step {step}"
            assert_gradients(gradients_of(manager), plain.gradients, exact, where)
            assert abs(result.loss - loss) <= 1e-5 * max(1.0, abs(loss)), where
            move(manager.model)
            plain.take_parameters(manager.model)


def move(model: nn.Module) -> None:
    """Makes a small step of gradient descent in place."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.grad is not None:
                gradient = parameter.grad if parameter.is_complex() else parameter.grad.clamp(-1, 1)
                parameter.add_(gradient, alpha=-1e-3)


# Wrappers that turn any module into a model with a scalar loss


def factor_of(index: int) -> float:
    """A factor that differs between neighbouring elements. It is at most 1, so inputs in [0, 1] stay there."""
    return 1.0 - 0.03 * (index % 7)


def noise(index: int, *shape: int) -> torch.Tensor:
    """Random numbers that depend on `index` alone; they leave the global generator as it is."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(index))


def scalar_of(outputs: Any) -> torch.Tensor:
    """A weighted sum of all differentiable outputs. The elements of an output have different weights."""
    total = torch.zeros(())
    for leaf in tree_leaves(outputs):
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            values = torch.view_as_real(leaf) if leaf.is_complex() else leaf
            weights = torch.arange(1, values.numel() + 1, dtype=torch.float32).cos()
            total = total + (values.reshape(-1).float() * weights).sum()
    return total


@dataclasses.dataclass(frozen=True)
class Learned:
    """Stands for an input that became a parameter of Case."""

    name: str


class Case(nn.Module):
    """A module and its inputs. Inputs that require gradients become parameters, so their gradients are compared."""

    def __init__(self, module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.module = module
        self.inputs = nn.ParameterDict()
        self._called_with = tree_map(self._learn, (tuple(args), kwargs))

    def _learn(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.requires_grad:
            return leaf
        name = str(len(self.inputs))
        self.inputs[name] = nn.Parameter(leaf.detach().clone())
        return Learned(name)

    def forward(self, index: int) -> torch.Tensor:
        factor = factor_of(index)
        args, kwargs = tree_map(
            lambda leaf: self.inputs[leaf.name] * factor if isinstance(leaf, Learned) else leaf, self._called_with
        )
        return scalar_of(self.module(*args, **kwargs))


class Bundle(nn.Module):
    """Many cases as one model, so that one manager runs them all. The loss is the sum of the cases' losses."""

    def __init__(self, cases: dict[str, nn.Module]) -> None:
        super().__init__()
        self.cases = nn.ModuleDict(cases)

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        losses = [case(int(index)).float() for case in self.cases.values()]
        return torch.stack(losses).sum()


def why_unfit(case: nn.Module) -> str | None:
    """Says why a case cannot be compared; None if it runs here and its gradients are finite."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        case = copy.deepcopy(case)
        try:
            loss = case(0)
            if not loss.requires_grad:
                return "its output has no gradient"
            loss.backward()
        except Exception as error:  # Different versions of torch raise different errors.
            return f"it raises {type(error).__name__}: {str(error).splitlines()[0]}"
    gradients = [parameter.grad for parameter in case.parameters() if parameter.grad is not None]
    if not gradients:
        return "no parameter takes part"
    if not all(bool(torch.isfinite(gradient).all()) for gradient in (loss, *gradients)):
        return "its gradients are not finite"
    return None


def bundle_of(cases: Iterable[tuple[str, nn.Module]]) -> tuple[Bundle, list[str]]:
    """A bundle of the cases that can run, and a line for each other case that says why it cannot."""
    fit: dict[str, nn.Module] = {}
    left_out = []
    for name, case in cases:
        reason = why_unfit(case)
        if reason is None:
            fit[name] = case
        else:
            left_out.append(f"{name}: {reason}")
    return Bundle(fit), left_out


def spread(values: Sequence[Any], most: int) -> Iterator[Any]:
    """Yields at most `most` values, spaced evenly from the first to the last."""
    if len(values) <= most:
        yield from values
    else:
        yield from (values[i * (len(values) - 1) // (most - 1)] for i in range(most))
