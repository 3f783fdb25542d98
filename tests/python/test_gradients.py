"""Checks gradients, parameters and results of a model against plain PyTorch over the same elements."""

import random
import warnings

import numpy
import pytest
import torch
from oracle import Oracle, assert_equal
from torch import nn
from vectors import Vectors, vectors

import accelmgr


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x, y):
        loss = nn.functional.mse_loss(self.second(torch.tanh(self.first(x))), y)
        return {"loss": loss, "twice": 2 * loss, "three": 3.0, "rows": torch.zeros(len(x))}


SHAPE = {"nprocs": 2, "batch_size_per_device": 3, "grad_accumulation_steps": 2}


@pytest.fixture(scope="module")
def pair():
    """A manager and an oracle. Every test steps both, so that they stay at the same element."""
    torch.manual_seed(1)
    model = Net()
    oracle = Oracle(model, vectors(4), **SHAPE)
    with accelmgr.Manager(model, Vectors(), **SHAPE) as manager:
        yield manager, oracle


def test_a_step_adds_one_mean_gradient_and_steps_accumulate(zeroed):
    manager, oracle = zeroed
    for _ in range(3):
        loss, samples = manager.step()
        assert loss == pytest.approx(oracle.step(), rel=1e-5)
        assert samples == 12
        assert_equal(manager.get_aggregated_gradients(), oracle.gradients())
    manager.zero_grad()
    assert not any(gradient.any() for gradient in manager.get_aggregated_gradients())


def test_numbers_beside_the_loss_arrive_averaged_like_it(zeroed):
    manager, oracle = zeroed
    result = manager.step()
    loss = oracle.step()
    assert result.scalars == {"twice": pytest.approx(2 * loss, rel=1e-5), "three": pytest.approx(3.0)}


def test_parameters_and_gradients_are_views_of_the_session(zeroed):
    manager, oracle = zeroed
    own = dict(manager.named_parameters())
    manager.step()
    oracle.step()
    before = [(p.data_ptr(), p.grad.data_ptr()) for p in manager.model.parameters()]
    for (name, parameter), gradient in zip(
        manager.model.named_parameters(), manager.get_aggregated_gradients(), strict=True
    ):
        assert parameter.data_ptr() == own[name].data_ptr()
        assert parameter.grad.data_ptr() == gradient.data_ptr()
    manager.step()
    oracle.step()
    manager.update_model_parameters([p.clone() for p in manager.model.parameters()])
    manager.zero_grad(set_to_none=False)
    assert [(p.data_ptr(), p.grad.data_ptr()) for p in manager.model.parameters()] == before


def test_gradients_that_were_set_to_none_come_back_at_their_places_without_a_word(zeroed):
    manager, oracle = zeroed
    manager.step()
    oracle.step()
    addresses = [p.grad.data_ptr() for p in manager.model.parameters()]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            manager.model.zero_grad(set_to_none=True)
            oracle.zero_grad()
            manager.step()
            oracle.step()
            assert [p.grad.data_ptr() for p in manager.model.parameters()] == addresses
            assert_equal([p.grad for p in manager.model.parameters()], oracle.gradients())
        manager.model.zero_grad(set_to_none=True)
        assert not any(gradient.any() for gradient in manager.get_aggregated_gradients())
    assert not said


def test_new_parameters_are_what_the_next_step_computes_with(zeroed):
    manager, oracle = zeroed
    values = [torch.full_like(p, 0.125 * (i + 1)) for i, p in enumerate(manager.model.parameters())]
    manager.update_model_parameters(iter(values))
    for parameter, value in zip(oracle.model.parameters(), values, strict=True):
        parameter.data.copy_(value)
    assert manager.step().loss == pytest.approx(oracle.step(), rel=1e-5)
    assert_equal(manager.get_aggregated_gradients(), oracle.gradients())


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda values: values[:-1], "3 tensors for 4 parameters"),
        (lambda values: [*values, values[0]], "5 tensors for 4 parameters"),
        (lambda values: [*values[:-1], values[-1][:1]], r"'second.bias' is float32 \[2\].*float32 \[1\]"),
        (lambda values: [*values[:-1], values[-1].double()], "float64"),
        (lambda values: [*values[:-1], values[-1].to("meta")], "on the CPU"),
    ],
    ids=["one_too_few", "one_too_many", "shape", "dtype", "device"],
)
def test_parameters_that_do_not_fit_change_nothing(zeroed, spoil, message):
    manager, _ = zeroed
    before = [p.detach().clone() for p in manager.model.parameters()]
    with pytest.raises(accelmgr.ModelError, match=message) as caught:
        manager.update_model_parameters(spoil([torch.zeros_like(p) for p in before]))
    assert "nothing was changed" in str(caught.value)
    assert_equal(manager.model.parameters(), before)


class Draws(nn.Module):
    """Returns numbers that it draws from the generators of torch, Python and numpy."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def forward(self, x):
        drawn = {"torch": torch.rand(()), "python": random.random(), "numpy": float(numpy.random.rand())}
        return {"loss": (self.weight * x).mean(), **drawn}


def test_generators_have_the_seed_of_the_rank():
    seeds = (7, 8)
    generators = [
        (torch.Generator().manual_seed(seed), random.Random(seed), numpy.random.RandomState(seed)) for seed in seeds
    ]
    elements = [{"x": torch.ones(1)}] * 6
    with accelmgr.Manager(Draws(), elements, nprocs=2, seed_base=7, runners__threads=1) as manager:
        for _ in range(3):
            drawn = [(torch.rand((), generator=t).item(), p.random(), n.rand()) for t, p, n in generators]
            means = [sum(of_ranks) / 2 for of_ranks in zip(*drawn, strict=True)]
            assert list(manager.step().scalars.values()) == pytest.approx(means, rel=1e-6)


class Tied(nn.Module):
    """A model with tied, frozen and unused parameters, and buffers."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(4, 4, bias=False)
        self.norm = nn.BatchNorm1d(4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.never = nn.Parameter(torch.ones(2))
        self.head = nn.Linear(4, 4, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x, y):
        return (self.head(self.frozen(self.norm(self.embed(x)))) ** 2).mean()


def test_tied_frozen_and_unused_parameters_and_buffers():
    torch.manual_seed(2)
    model = Tied()
    oracle = Oracle(model, vectors(4), nprocs=2, batch_size_per_device=2)
    with accelmgr.Manager(model, Vectors(), nprocs=2, batch_size_per_device=2) as manager:
        assert "head.weight" not in dict(manager.named_parameters())
        assert "accelmgr-values" not in open("/proc/self/maps").read(), "the initial values are kept once"
        assert model.head.weight.data_ptr() == model.embed.weight.data_ptr()
        for _ in range(3):
            result = manager.step(accumulate=False)
            oracle.zero_grad()
            assert result.loss == pytest.approx(oracle.step(), rel=1e-5)
            names = [name for name, _ in model.named_parameters()]
            gradients = dict(zip(names, manager.get_aggregated_gradients(), strict=True))
            assert_equal(gradients.values(), oracle.gradients())
            assert not gradients["never"].any() and not gradients["frozen.weight"].any()
        buffers = manager.buffers()
        model.norm.running_mean.zero_()
        manager.sync_buffers()
        assert_equal([model.norm.running_mean], [buffers["norm.running_mean"]])
        state = manager.state_dict()
        assert torch.equal(state["head.weight"], state["embed.weight"]) and "norm.running_mean" in state


class WithEmpty(nn.Module):
    """A parameter without elements lies where another one begins: here the bias, which comes first in the model."""

    def __init__(self, shape, uses_it):
        super().__init__()
        self.bias = nn.Parameter(torch.randn(2))
        self.empty = nn.ParameterList(torch.empty(shape) for _ in range(20))
        self.head = nn.Linear(4, 2)
        self.uses_it = uses_it

    def forward(self, x, y):
        loss = nn.functional.mse_loss(self.head(x) + self.bias, y)
        return loss + sum(empty.sum() for empty in self.empty) if self.uses_it else loss


@pytest.mark.parametrize("uses_it", [False, True])
@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), (2, 0, 3)], ids=str)
def test_a_parameter_without_elements_takes_no_gradient_from_its_neighbours(shape, uses_it):
    torch.manual_seed(5)
    model = WithEmpty(shape, uses_it)
    oracle = Oracle(model, vectors(4), **SHAPE)
    with accelmgr.Manager(model, Vectors(), **SHAPE) as manager:
        manager.step()
        oracle.step()
        assert_equal(manager.get_aggregated_gradients(), oracle.gradients())


def test_after_zeroing_a_gradient_of_minus_zero_keeps_its_sign():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self, x):
            return (self.weight * x[0]).sum()

    model = Scaled()
    data = [torch.tensor([-0.0, 1.0])] * 8
    with accelmgr.Manager(model, data, nprocs=1, batch_size_per_device=1, runners__threads=1) as manager:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for zero in (manager.zero_grad, optimizer.zero_grad):
            manager.step()
            assert model.weight.grad.signbit().tolist() == [True, False]
            zero()
        manager.step()
        optimizer.zero_grad(set_to_none=False)
        manager.step()
        assert model.weight.grad.signbit().tolist() == [False, False]  # 0.0 + -0.0, as in plain PyTorch.
