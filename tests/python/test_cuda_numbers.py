"""What CUDA runners compute, against plain PyTorch on the CPU. The device is the fake of cuda_runners.py."""

from __future__ import annotations

import copy
import ctypes
import pathlib
import re
from typing import Any

import device_suite
import pytest
import torch
from cuda_runners import GPU, FakeCuda, install, on_the_fake, start, train
from device_runners import Encoder, Vectors, assert_close, vectors
from oracle import Oracle, assert_equal
from programs import run
from torch import nn
from torch.utils.checkpoint import checkpoint


class TestNumbers(device_suite.Numbers):
    start = staticmethod(start)


class Watched(Encoder):
    """From its second micro-batch on, nothing may be read while it computes. May read a value itself."""

    def __init__(self, reads: bool) -> None:
        super().__init__()
        self._reads = reads

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
        if hasattr(FakeCuda, "current"):
            FakeCuda.current.refuses_reads = True
        outputs = super().forward(x, y)
        if self._reads:
            outputs["first"] = outputs["loss"].item()
        return outputs


@on_the_fake
@pytest.mark.parametrize("reads", [False, True])
def test_nothing_is_read_before_the_last_backward_pass_is_queued(reads):
    with start(Watched(reads), Vectors(), nprocs=1, grad_accumulation_steps=3) as manager:
        results = [manager.step() for _ in range(3 - 2 * reads)]
        assert all(result.ok != reads for result in results), results
        assert ("reads from the device" in results[-1].error) == reads


class Expanded(nn.Module):
    """A buffer whose elements share memory, an empty one, and one that the model writes without a trace."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.register_buffer("wide", torch.ones(1).expand(4))
        self.register_buffer("empty", torch.empty(0))
        self.register_buffer("hidden", torch.zeros(2))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.hidden.data += 1
        return (self.linear(x * self.wide) - y + self.hidden).square().mean()


def test_buffers_of_any_form():
    torch.manual_seed(3)
    model = Expanded()
    oracle = Oracle(model, vectors(4), grad_accumulation_steps=2)
    with start(model, Vectors(), nprocs=1, grad_accumulation_steps=2) as manager:
        for _ in range(3):
            assert manager.step().loss == pytest.approx(oracle.step(), rel=1e-5)
            assert_close(manager, oracle)
        assert manager.buffers()["hidden"].tolist() == [6, 6]


class Odd(nn.Module):
    """Gradients that are sparse, transposed by a hook, of a weight used by several backward passes, and of one that
    only some batches use; tensors in the batch that are neither named nor alone."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4, sparse=True)
        self.shared = nn.Linear(4, 4)
        self.turned = nn.Parameter(torch.randn(4, 4))
        self.sometimes = nn.Parameter(torch.randn(4))
        self.turned.register_post_accumulate_grad_hook(turn)
        self.calls = 0

    def forward(self, words: torch.Tensor, rest: dict[str, Any]) -> torch.Tensor:
        hidden = self.embedding(words)
        for _ in range(3):
            hidden = checkpoint(self.layer, hidden, use_reentrant=True)
        hidden = hidden @ self.turned
        if rest["many"][0].sum() > 3:
            hidden = hidden * self.sometimes
        rest["many"][1].add_(1)  # The batch is the model's own.
        return (hidden.mean((1, 2)) - rest["many"][1].float()).square().mean()

    def layer(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.shared(x))


def turn(parameter: torch.Tensor) -> None:
    parameter.grad = parameter.grad.t().contiguous().t()


def words(index: int) -> dict[str, Any]:
    rest = {"many": (torch.randint(5, (2,)), torch.tensor(index % 7))}
    return {"words": torch.randint(8, (3,)), "rest": rest}


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_gradients_of_any_form_and_batches_of_any_structure(micro_batches):
    torch.manual_seed(5)
    options = {
        "batch_size_per_device": 2,
        "grad_accumulation_steps": micro_batches,
        "collate_fn": torch.utils.data.default_collate,
    }
    elements = [words(index) for index in range(100)]
    train(Odd(), elements, iter(elements), steps=4, **options)


DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64)
EXTREMES = (1.0, torch.inf, -torch.inf, torch.nan)


class Extremes(nn.Module):
    """Multiplies the gradient of each parameter by a number of the batch. The loss is finite."""

    def __init__(self) -> None:
        super().__init__()
        self.several = nn.ParameterList(torch.ones(3, dtype=dtype) for dtype in DTYPES)
        self.empty = nn.Parameter(torch.ones(0))

    def forward(self, factors: torch.Tensor) -> torch.Tensor:
        loss = self.empty.sum()
        for parameter, factor in zip(self.several, factors[0], strict=True):
            used = parameter * 1
            used.register_hook(lambda gradient, factor=factor: gradient * factor.to(gradient.dtype))
            loss = loss + used.abs().float().sum()
        return loss


def test_gradients_that_are_not_finite_are_found_on_the_device(capfd):
    factors = torch.ones(4 * len(DTYPES), len(DTYPES))
    for index, each in enumerate(factors):
        each[index // 4] = EXTREMES[index % 4]
    with start(Extremes(), factors.unbind(), nprocs=1, batch_size_per_device=1, on_nonfinite="skip_batch") as manager:
        skipped = [manager.step(accumulate=False).skipped for _ in range(len(DTYPES) + 1)]
    assert skipped == [0, 3, 3, 3, 3, 3]
    named = re.findall(r"the gradient of 'several\.(\d)' is not finite \(loss 15\)", capfd.readouterr().err)
    assert [int(name) for name in named] == [index for index in range(len(DTYPES)) for _ in range(3)]


class Conjugated(nn.Module):
    """Its parameter's gradient is a view that torch conjugates when it is read."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, dtype=torch.complex64))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return (self.weight.conj() * torch.view_as_complex(values)).real.sum()


@pytest.mark.parametrize("options", [{}, {"runners__cuda_graph": "auto"}, {"gradients": {"slab_dtype": "bf16"}}])
def test_gradients_that_are_conjugated_views_are_read_as_such(options):
    model, values = Conjugated(), torch.randint(-9, 9, (1, 5, 2)).float()
    plain = copy.deepcopy(model)
    plain(values).backward()
    assert plain.weight.grad.is_conj()
    with start(model, values.repeat(100, 1, 1), nprocs=1, batch_size_per_device=1, **options) as manager:
        for _ in range(5):
            manager.step(accumulate=False)
            assert torch.equal(manager.model.weight.grad, plain.weight.grad)


class Packed(nn.Module):
    """Takes sequences of several lengths, packed, and beside them an object that torch knows nothing of."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(1, 6)

    def forward(self, packed: nn.utils.rnn.PackedSequence, weights: Weights) -> torch.Tensor:
        output, _ = self.lstm(packed)
        padded, lengths = nn.utils.rnn.pad_packed_sequence(output)
        assert lengths.device.type == "cpu" and weights.device == padded.device
        return (padded * weights.values).square().mean()


class Weights:
    """As batches of libraries for graphs are: `.to()` gives one of another device."""

    def __init__(self, values: torch.Tensor, device: torch.device) -> None:
        self.values, self.device = values, device

    def to(self, device: torch.device) -> Weights:
        return Weights(self.values.to(device), device)


def packed(elements: list[Any]) -> Any:
    sequences = [element["x"][: 2 + index % 3, None] for index, element in enumerate(elements)]
    return nn.utils.rnn.pack_sequence(sequences, enforce_sorted=False), Weights(
        torch.linspace(1, 2, 6), torch.device("cpu")
    )


def test_packed_sequences_and_batches_with_a_method_for_devices():
    torch.manual_seed(8)
    train(Packed(), Vectors(), vectors(4), batch_size_per_device=3, collate_fn=packed)


class Sums(nn.Module):
    """A hook of the user multiplies the gradient that it finds, which is the sum over the micro-batches so far."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.linear.weight.register_post_accumulate_grad_hook(double)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self.linear(x) - y).square().mean()


def double(parameter: torch.Tensor) -> None:
    parameter.grad *= 2


def test_hooks_of_the_user_see_the_sum_as_on_the_cpu():
    found = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(6)
        with start(Sums(), Vectors(), nprocs=1, grad_accumulation_steps=3, device=device) as manager:
            assert manager.step().ok
            found.append([gradient.clone() for gradient in manager.get_aggregated_gradients()])
    assert_equal(found[1], found[0])


class Beside(nn.Module):
    """Its gradient is written by another stream than that of the forward pass, and late."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.values = torch.zeros(4)
        self.steps = 0

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        fake = FakeCuda.current
        self.steps += 1
        self.values.copy_(x[0])
        fake.runtime.cudaHostRegister(ctypes.c_void_p(self.values.data_ptr()), ctypes.c_size_t(16), 0)
        if self.weight._backward_hooks is None:
            self.weight.register_hook(self.late)
        return (self.weight * x).sum()

    def late(self, gradient: torch.Tensor) -> torch.Tensor:
        if self.steps == 1:
            return gradient  # Such a gradient is copied behind the backward pass, for which torch has waited.
        fake, target = FakeCuda.current, torch.zeros(4)
        fake.current_stream = lambda: fake.side_stream  # type: ignore[method-assign]
        to, from_ = ctypes.c_void_p(target.data_ptr()), ctypes.c_void_p(self.values.data_ptr())
        assert fake.runtime.cudaMemcpyAsync(to, from_, ctypes.c_size_t(16), 1, fake.streams[2]) == 0
        return target


@on_the_fake
def test_a_gradient_of_another_stream_is_awaited():
    model = Beside()
    with start(model, Vectors(), nprocs=1) as manager:
        elements = vectors(4)
        for _ in range(3):
            manager.step(accumulate=False).raise_for_status()
            assert_equal([model.weight.grad], [next(elements)["x"]])
        assert manager.statistics().replacements == 0


def test_gradients_are_rounded_once_where_slabs_are_bfloat16():
    torch.manual_seed(8)
    model = Encoder()
    oracle = Oracle(model, vectors(4), nprocs=1, grad_accumulation_steps=2)
    with start(model, Vectors(), nprocs=1, grad_accumulation_steps=2, gradients={"slab_dtype": "bf16"}) as manager:
        for _ in range(3):
            assert manager.step(accumulate=False).ok
            oracle.zero_grad()
            oracle.step()
            for ours, theirs in zip(manager.get_aggregated_gradients(), oracle.gradients(), strict=True):
                torch.testing.assert_close(ours, theirs, rtol=2**-8, atol=1e-6)


def train_in_a_fork() -> None:
    if not GPU:
        install()  # Nothing is unpickled there.
    torch.manual_seed(1)
    train(Encoder(), Vectors(), vectors(4), steps=2, start_method="fork")


def test_the_manager_may_be_a_fork():
    # A process of its own: where libraries are looked for is settled when a program starts, and a fork inherits it.
    code, _, err = run("-c", "import test_cuda_numbers; test_cuda_numbers.train_in_a_fork()", cwd=pathlib.Path.cwd())
    assert code == 0, err
