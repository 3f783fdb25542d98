"""Checks that buffers, batches, parameters and states of a model are in runners what they are in plain torch."""

import copy
import itertools
import os
import signal
import threading

import pytest
import safetensors.torch
import torch
from saving import save
from torch import nn

import accelmgr

METHODS = ["forkserver", "fork"]  # forkserver pickles the model, as spawn does; fork does not.
ONE = {"nprocs": 1, "runners__threads": 1}


class Numbers:
    """Random rows, all different."""

    def __iter__(self):
        generator = torch.Generator().manual_seed(3)
        while True:
            yield torch.randn(4, generator=generator)


def rows(count):
    return torch.stack(list(itertools.islice(Numbers(), count)))


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=1e-7)


# Buffers


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 3), nn.BatchNorm1d(3)

    def forward(self, x):
        return self.norm(self.linear(x)).pow(2).mean()


class Growing(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        self.mean = torch.zeros(len(self.mean) + 1)
        return self.weight.sum() + 0 * x.sum()


def test_a_buffer_that_goes_on_changing_its_shape_is_named():
    with accelmgr.Manager(Growing(), Numbers(), runners__on_loss="fail", **ONE) as manager:
        assert manager.step().ok, "the first batch may decide about it"
        with pytest.raises(accelmgr.ModelError, match=r"changed its buffer 'mean' again, to torch.float32 \[6\]"):
            manager.step().raise_for_status()


class Weighted(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x):
        return self.scale * (self.weight * x.abs()).sum()


def test_a_write_that_torch_does_not_see_reaches_the_runners_by_update_buffers():
    """Other writes to buffers are in test_buffers.py."""
    model = Weighted()
    with accelmgr.Manager(model, Numbers(), **ONE) as manager:
        model.scale.numpy()[()] = 5
        manager.update_buffers()
        assert manager.step().loss == pytest.approx(5 * rows(1).abs().sum().item())
        assert manager.buffers()["scale"] == 5
        model.scale = torch.ones(2)
        with pytest.raises(accelmgr.ModelError, match=r"'scale' is float32 \[\], .* float32 \[2\]; nothing was"):
            manager.step()


class Summed(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def forward(self, x):
        return self.layers(x).pow(2).sum()


# Batches


class Spoiling(nn.Module):
    """Changes its batch in place, keeps it, and checks that kept batches stay the same. Its process dies once."""

    def __init__(self, marker):
        super().__init__()
        self.weight, self.kept, self.marker = nn.Parameter(torch.ones(4)), [], marker

    def forward(self, x):
        x.mul_(10)
        if len(self.kept) == 3 and not self.marker.exists():
            self.marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        self.kept.append((x, x.clone()))
        if not all(torch.equal(batch, copy) for batch, copy in self.kept):
            raise RuntimeError("a batch that was kept has changed")
        return (self.weight * x).sum()


def test_a_model_may_change_and_keep_its_batch_which_comes_again_as_it_was(tmp_path):
    with accelmgr.Manager(Spoiling(tmp_path / "died"), Numbers(), **ONE) as manager:
        for number in range(1, 8):
            result = manager.step(accumulate=False)
            assert (result.ok, result.tries) == (True, 2 if number == 4 else 1)
            close(manager.model.weight.grad, 10 * rows(number)[-1])


# Parameter classes, ties and state dicts


class Kind(nn.Parameter):
    pass


class OfAKind(nn.Module):
    """Has a parameter of a subclass with an attribute."""

    def __init__(self):
        super().__init__()
        self.kind = Kind(torch.ones(4))
        self.kind.note = "carried"

    def forward(self, x):
        if type(self.kind) is not Kind or self.kind.note != "carried":
            raise RuntimeError(f"{type(self.kind)}")
        return (self.kind * x).sum()


@pytest.mark.parametrize("start_method", METHODS)
def test_classes_of_parameters_go_along(start_method):
    with accelmgr.Manager(OfAKind(), Numbers(), start_method=start_method, **ONE) as manager:
        manager.step().raise_for_status()
        close(manager.model.kind.grad, rows(1)[0])


class Saved(nn.Module):
    """Has everything that a state dict treats specially: ties, buffers that are not persistent, extra state."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("kept", torch.ones(2))
        self.register_buffer("scratch", torch.ones(2), persistent=False)
        self.other = nn.Module()
        self.other.register_buffer("shared", self.kept)
        self.other.linear = self.linear
        self.calls = 5

    def forward(self, x):
        self.scratch.add_(1)
        self.kept.mul_(2)
        return self.linear(x).sum()

    def get_extra_state(self):
        return {"calls": self.calls}

    def set_extra_state(self, state):
        self.calls = state["calls"]


def test_the_state_dict_loads_back(tmp_path):
    model = Saved()
    with accelmgr.Manager(model, Numbers(), checkpoint__directory=str(tmp_path), **ONE) as m:
        m.step().raise_for_status()
        state = m.state_dict()
        assert list(state) == list(model.state_dict())
        assert "scratch" not in state and torch.equal(state["other.shared"], torch.full((2,), 2.0))
        model.load_state_dict(state)
        assert model.kept.tolist() == [2, 2]
        written = save(m)
    fresh = Saved()
    found = fresh.load_state_dict(safetensors.torch.load_file(f"{written.path}/model.safetensors"), strict=False)
    tied = {"other.shared", "other.linear.weight", "other.linear.bias"}  # The file's metadata names these.
    assert set(found.missing_keys) == tied | {"_extra_state"} and not found.unexpected_keys
    assert fresh.kept.tolist() == [2, 2]
    with accelmgr.Manager(Saved(), Numbers(), nprocs=1, checkpoint__resume=written.path) as manager:
        assert manager.model.kept.tolist() == [2, 2] and manager.buffers()["scratch"].tolist() == [2, 2]


def locked():
    torch.manual_seed(4)
    model = Summed(nn.Linear(4, 4))
    model.lock = threading.Lock()
    return model


def test_a_function_that_makes_the_model_serves_where_it_cannot_be_pickled():
    with pytest.raises(accelmgr.ModelError, match=r"cannot be pickled.*Manager\(make_model, \.\.\.\)"):
        accelmgr.Manager(locked(), Numbers(), start_method="forkserver", **ONE)
    with accelmgr.Manager(locked, Numbers(), start_method="forkserver", **ONE) as manager:
        manager.step().raise_for_status()
        plain = locked()
        plain(rows(1)).backward()
        for (name, one), other in zip(manager.model.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-5, msg=name)


def test_a_function_that_makes_another_model_elsewhere_is_named():
    host = os.getpid()

    def grows():
        return nn.Linear(4, 2 + (os.getpid() != host))

    with pytest.raises(accelmgr.ModelError, match=r"made a different model in the host: \('weight', \(3, 4\)"):
        accelmgr.Manager(grows, Numbers(), start_method="forkserver", **ONE)


# A model that leaves the session


LEAVES = {
    "'linear.weight' of the model was replaced": lambda m: setattr(m.linear, "weight", nn.Parameter(rows(3))),
    "of the model were replaced": lambda m: m.load_state_dict(copy.deepcopy(m.state_dict()), assign=True),
    "'linear.weight', 'linear.bias' of the model were replaced": lambda m: setattr(m, "linear", nn.Linear(4, 3)),
    "'more.weight', 'more.bias' of the model were added": lambda m: setattr(m, "more", nn.Linear(2, 2)),
    "'norm.weight', 'norm.bias' of the model were removed": lambda m: delattr(m, "norm"),
}


@pytest.mark.parametrize("what", LEAVES)
def test_a_parameter_that_is_no_longer_the_sessions_is_an_error_of_the_next_call(what, normed):
    normed.step().raise_for_status()
    model, before = normed.model, list(normed.model.parameters())
    modules, buffers = dict(model._modules), {m: dict(m._buffers) for m in model.modules()}
    owned = {m: dict(m._parameters) for m in model.modules()}
    LEAVES[what](model)
    for call in (
        normed.step,
        normed.zero_grad,
        normed.parameters,
        normed.get_aggregated_gradients,
        lambda: normed.update_model_parameters(before),
        lambda: normed.check_optimizer(torch.optim.SGD(model.parameters())),
    ):
        with pytest.raises(accelmgr.ModelError, match=f"after the start .*{what}.*in place"):
            call()
    model._modules.update(modules)
    for name in set(model._modules) - set(modules):
        del model._modules[name]
    for module, parameters in owned.items():
        module._parameters.update(parameters)
        module._buffers.update(buffers[module])
    normed.step().raise_for_status()


@pytest.fixture(scope="module")
def normed():
    with accelmgr.Manager(Normed(), Numbers(), batch_size_per_device=2, **ONE) as manager:
        yield manager


class Replacing(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x):
        self.weight = nn.Parameter(self.weight.detach() * 2)
        return (self.weight * x).sum()


def test_a_model_that_replaces_its_parameter_is_told():
    with accelmgr.Manager(Replacing(), Numbers(), runners__on_loss="fail", **ONE) as manager:
        with pytest.raises(accelmgr.ModelError, match="'weight' of the model was replaced"):
            manager.step().raise_for_status()


def test_a_layer_without_parameters_may_come_later():
    with accelmgr.Manager(Normed(), Numbers(), batch_size_per_device=2, **ONE) as manager:
        manager.model.activation = nn.ReLU()
        manager.step().raise_for_status()
        del manager.model.activation
        manager.step().raise_for_status()


class Reading:
    """Leaves a file named after each process that unpickles it."""

    def __init__(self, folder):
        self.folder, self.large = folder, b"x" * (1 << 20)

    def __iter__(self):
        yield from rows(8)

    def __setstate__(self, state):
        self.__dict__.update(state)
        with open(f"/proc/{os.getpid()}/comm") as comm:
            (self.folder / f"{comm.read().strip()}-{os.getpid()}").touch()


def test_the_dataset_is_unpickled_in_the_manager_alone(tmp_path):
    with accelmgr.Manager(Weighted(), Reading(tmp_path), nprocs=2, runners__threads=1, start_method="spawn") as manager:
        manager.step().raise_for_status()
        assert [path.name for path in tmp_path.iterdir()] == [f"accelmgr:mgr-{manager.statistics().manager_pid}"]
        for runner in manager.statistics().runners:
            with open(f"/proc/{runner.pid}/maps") as maps:
                assert "accelmgr-objects" not in maps.read()  # Runners do not keep the pickled bytes.
