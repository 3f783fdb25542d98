"""Small models that use features of autograd as users do. Each is called with the number of an element."""

from __future__ import annotations

from collections.abc import Callable

import torch
from differential import noise, scalar_of
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

SIDE = 132  # A square weight has 68 KiB: more than an allocator treats as small.


class Feature(nn.Module):
    """Base of the features: two linear layers over noise. Subclasses override hidden() or forward()."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(SIDE, SIDE), nn.Linear(SIDE, SIDE)

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))

    def forward(self, index: int) -> torch.Tensor:
        return scalar_of(self.hidden(noise(index, 3, SIDE)))


class LoRA(Feature):
    """weight + B @ A, where A and B have the same size and the weight is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first.requires_grad_(False)
        self.down, self.up = nn.Parameter(noise(1, SIDE, SIDE) / 12), nn.Parameter(noise(2, SIDE, SIDE) / 12)

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.first.weight + self.up @ self.down
        return self.second(nn.functional.linear(x, weight, self.first.bias))


class Adapter(Feature):
    """A bottleneck beside frozen layers."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.down, self.up = nn.Linear(SIDE, 8), nn.Linear(8, SIDE)

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        return super().hidden(x) + self.up(torch.relu(self.down(x)))


class TiedByName(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(40, SIDE), nn.Linear(SIDE, 40, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, index: int) -> torch.Tensor:
        tokens = (torch.arange(9) * (index + 3)) % 40
        return nn.functional.cross_entropy(self.head(self.embedding(tokens)), tokens.roll(1))


class TiedByStorage(Feature):
    """Two parameters share one storage. Each has its own gradient; a write to one changes both."""

    def __init__(self) -> None:
        super().__init__()
        self.second.weight = nn.Parameter(self.first.weight.data)


class Parts(nn.Module):
    """Two weights are parts of one tensor that do not overlap."""

    def __init__(self) -> None:
        super().__init__()
        packed = torch.randn(2, SIDE, SIDE) / 12
        self.query, self.key = (nn.Parameter(part) for part in packed)

    def forward(self, index: int) -> torch.Tensor:
        return scalar_of(noise(index, 3, SIDE) @ self.query @ self.key)


class Checkpointed(Feature):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self._reentrant = reentrant
        self.before = nn.Linear(SIDE, SIDE)

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = checkpoint(super().hidden, self.before(x), use_reentrant=self._reentrant)
        return checkpoint(super().hidden, hidden, use_reentrant=self._reentrant) + hidden  # Again the same weights.


class HooksOnActivations(Feature):
    """One hook keeps every gradient that it sees; two others replace the gradient."""

    kept: list[torch.Tensor]

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = []
        first = self.first(x)
        first.register_hook(self.kept.append)
        activation = torch.tanh(first)
        activation.register_hook(lambda gradient: 0.5 * gradient)
        activation.retain_grad()
        second = self.second(activation)
        second.register_hook(lambda gradient: gradient.clone().mul_(3))
        return second


def scaled(gradient: torch.Tensor) -> torch.Tensor:
    return gradient * 0.25


def scale_afterwards(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(2)


class HooksOnParameters(Feature):
    def __init__(self) -> None:
        super().__init__()
        self.first.weight.register_hook(scaled)
        self.second.weight.register_hook(lambda gradient: gradient.clamp(-0.5, 0.5).t().contiguous().t())
        self.second.bias.register_post_accumulate_grad_hook(scale_afterwards)


class HookOnWhatIsAccumulated(Feature):
    """In PyTorch this hook sees the sum of all micro-batches so far."""

    def __init__(self) -> None:
        super().__init__()
        self.first.weight.register_post_accumulate_grad_hook(scale_afterwards)


class KeepsGradients(Feature):
    """A hook keeps the gradients of past steps. The model's output changes if a kept gradient has changed since."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[torch.Tensor] = []
        self.seen: list[float] = []

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        changed = sum(gradient.sum().item() != seen for gradient, seen in zip(self.kept, self.seen, strict=True))
        weight = self.first.weight * 1.0
        weight.register_hook(self._keep)
        return nn.functional.linear(x, weight) * (1.0 + changed)

    def _keep(self, gradient: torch.Tensor) -> None:
        self.kept.append(gradient)
        self.seen.append(gradient.sum().item())


class DoubleBackward(Feature):
    """A gradient penalty, as for the critic of a Wasserstein GAN."""

    def forward(self, index: int) -> torch.Tensor:
        x = noise(index, 3, SIDE).requires_grad_()
        out = self.hidden(x).square().mean()
        (gradient,) = torch.autograd.grad(out, x, create_graph=True)
        weights = torch.autograd.grad(out, [self.first.weight, self.second.weight], create_graph=True)
        return out + (gradient.norm() - 1) ** 2 + sum(weight.square().sum() for weight in weights)


class ChannelsLast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(8, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 64, 3))
        self.layers.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, index: int) -> torch.Tensor:
        return scalar_of(self.layers(noise(index, 2, 8, 7, 7).to(memory_format=torch.channels_last)))


class ComplexBuffer(Feature):
    """Rotary position embeddings in a complex buffer."""

    def __init__(self) -> None:
        super().__init__()
        angles = torch.outer(torch.arange(3.0), torch.arange(SIDE // 2) / SIDE)
        self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles))
        self.register_buffer("seen", torch.zeros(2, dtype=torch.complex64))

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.view_as_complex(super().hidden(x).view(3, SIDE // 2, 2)) * self.turns
        self.seen += hidden.detach().mean()
        return torch.view_as_real(hidden * (1 + self.seen[0])).flatten(1)


class Unused(Feature):
    """Outputs that do not reach the loss, a parameter that is never used, and one that is used now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.never, self.sometimes = nn.Linear(SIDE, SIDE), nn.Parameter(torch.ones(SIDE))

    def forward(self, index: int) -> torch.Tensor:
        x = noise(index, 4, SIDE)
        used, _ = self.hidden(x).split([2, 2])
        _, other = torch.stack([self.first(x), self.second(x)])
        if index % 3 == 1:
            used = used * self.sometimes
        return scalar_of(used) + scalar_of(other[0])


class Sparse(nn.Module):
    """A sparse gradient with a different number of rows each time; some rows occur twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.bag = nn.Embedding(300, 64, sparse=True), nn.EmbeddingBag(50, 8, sparse=True, mode="sum")
        self.head = nn.Linear(64, 8)

    def forward(self, index: int) -> torch.Tensor:
        tokens = (torch.arange(12 + index) ** 2) % 31
        return scalar_of((self.head(self.embedding(tokens)), self.bag(tokens.view(1, -1) % 50)))


class Lent(Feature):
    """Weights are used in parts, in different shapes, and several times."""

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        query, key = self.first.weight.chunk(2, dim=0)
        both = torch.nn.functional.linear(x, query) * torch.nn.functional.linear(x, key)
        return (both @ query + x @ self.second.weight.T) @ self.second.weight + self.first.bias.expand(3, -1)


class Parametrized(Feature):
    def __init__(self, parametrize: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        parametrize(self.first)
        parametrize(self.second)


PARAMETRIZATIONS = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
}


def features() -> dict[str, nn.Module]:
    """The features that can be pickled."""
    torch.manual_seed(4)
    return {
        "lora": LoRA(),
        "adapter": Adapter(),
        "tied_by_name": TiedByName(),
        "checkpointed": Checkpointed(False),
        "checkpointed_reentrant": Checkpointed(True),
        "hooks_on_activations": HooksOnActivations(),
        "keeps_gradients": KeepsGradients(),
        "double_backward": DoubleBackward(),
        "complex_buffer": ComplexBuffer(),
        "unused": Unused(),
        "sparse": Sparse(),
        "lent": Lent(),
    }
