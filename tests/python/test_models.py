"""Checks that buffers, modes, hooks, ties and batches of a model are in runners what they are in plain torch."""

import copy
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

    def __init__(self, width=4):
        self.width = width

    def __iter__(self):
        generator = torch.Generator().manual_seed(3)
        while True:
            yield torch.randn(self.width, generator=generator)


def rows(count, width=4):
    iterator = iter(Numbers(width))
    return torch.stack([next(iterator) for _ in range(count)])


def plain_gradients(model, batches, divisor=1):
    plain = copy.deepcopy(model)
    for batch in batches:
        (plain(batch) / divisor).backward()
    return {name: parameter.grad for name, parameter in plain.named_parameters()}


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=1e-7)


# Buffers


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 3), nn.BatchNorm1d(3)

    def forward(self, x):
        return self.norm(self.linear(x)).pow(2).mean()


@pytest.mark.parametrize("start_method", METHODS)
def test_each_runner_has_buffers_of_its_own(start_method):
    with accelmgr.Manager(Normed(), Numbers(), nprocs=2, batch_size_per_device=3, start_method=start_method) as manager:
        for _ in range(5):
            manager.step().raise_for_status()
        assert manager.buffers()["norm.num_batches_tracked"] == 5


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


def test_buffers_that_the_host_writes_reach_the_runners():
    model = Weighted()
    with accelmgr.Manager(model, Numbers(), nprocs=2, runners__threads=1) as manager:

        def step():
            loss = manager.step(accumulate=False).loss
            return loss / model.scale.item()

        def expected(number):
            return rows(2 * number)[-2:].abs().sum().item() / 2

        assert step() == pytest.approx(expected(1))
        model.scale.fill_(10)
        assert step() == pytest.approx(expected(2))
        model.scale = torch.tensor(3.0)
        assert step() == pytest.approx(expected(3))
        model.load_state_dict({"weight": torch.ones(4), "scale": torch.tensor(7.0)})
        assert step() == pytest.approx(expected(4))
        model.scale.numpy()[()] = 5  # torch does not see this write; update_buffers() must.
        manager.update_buffers()
        assert step() == pytest.approx(expected(5))
        assert manager.buffers()["scale"] == 5
        model.scale = torch.ones(2)
        with pytest.raises(accelmgr.ModelError, match=r"'scale' is float32 \[\], .* float32 \[2\]; nothing was"):
            manager.step()


# Modes and what requires gradients


class Moded(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout(0.5)

    def forward(self, x):
        modes = [float(module.training) for module in (self, self.norm, self.drop)]
        loss = self.drop(self.norm(self.linear(x))).pow(2).mean()
        return {"loss": loss, "self": modes[0], "norm": modes[1], "drop": modes[2]}


@pytest.mark.parametrize("start_method", METHODS)
def test_modes_of_modules_are_the_hosts(start_method):
    model = Moded()
    model.norm.eval()
    with accelmgr.Manager(model, Numbers(), batch_size_per_device=2, start_method=start_method, **ONE) as manager:
        assert manager.step().scalars == {"self": 1, "norm": 0, "drop": 1}
        model.train()
        assert manager.step().scalars == {"self": 1, "norm": 1, "drop": 1}
        model.eval()
        assert manager.step().scalars == {"self": 0, "norm": 0, "drop": 0}


def test_requires_grad_may_change_between_steps():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    model[0].weight.requires_grad_(False)
    summed = Summed(model)
    with accelmgr.Manager(summed, Numbers(), **ONE) as manager:
        for number, frozen in enumerate(["0.weight", "1.bias", "0.weight", None], 1):
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(name != frozen)
            manager.step(accumulate=False).raise_for_status()
            expected = plain_gradients(summed, [rows(number)[-1:]])
            for name, parameter in summed.named_parameters():
                assert (parameter.grad is None) == (name == f"layers.{frozen}"), (number, name)
                if parameter.grad is not None:
                    close(parameter.grad, expected[name])


class Summed(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def forward(self, x):
        return self.layers(x).pow(2).sum()


# Batches


class Spoiling(nn.Module):
    """Changes its batch in place, keeps it, and checks that kept batches stay the same."""

    def __init__(self):
        super().__init__()
        self.weight, self.kept = nn.Parameter(torch.ones(4)), []

    def forward(self, x):
        x.mul_(10)
        self.kept.append((x, x.clone()))
        if not all(torch.equal(batch, copy) for batch, copy in self.kept):
            raise RuntimeError("a batch that was kept has changed")
        return (self.weight * x).sum()


def test_a_model_may_change_and_keep_its_batch():
    with accelmgr.Manager(Spoiling(), Numbers(), nprocs=2, runners__threads=1) as manager:
        for number in range(1, 8):
            manager.step(accumulate=False).raise_for_status()
            close(manager.model.weight.grad, 10 * rows(2 * number)[-2:].mean(0))


class SpoiltOnce(nn.Module):
    def __init__(self, marker):
        super().__init__()
        self.weight, self.marker = nn.Parameter(torch.ones(4)), marker

    def forward(self, x):
        x.mul_(10)
        if not self.marker.exists():
            self.marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return (self.weight * x).sum()


def test_a_step_that_is_repeated_has_the_same_batch(tmp_path):
    model = SpoiltOnce(tmp_path / "failed")
    with accelmgr.Manager(model, Numbers(), runners__on_loss="restart", **ONE) as manager:
        result = manager.step()
        assert result.ok and result.tries == 2
        close(model.weight.grad, 10 * rows(1)[0])


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


class TiedByStorage(nn.Module):
    """Parameters that share one storage, one transposed and one a row. Plain torch gives each its own gradient."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(4, 3, bias=False)
        self.decoder = nn.Linear(3, 4, bias=False)
        self.decoder.weight = nn.Parameter(self.encoder.weight.data.t())
        self.row = nn.Parameter(self.encoder.weight.data[1])

    def forward(self, x):
        return (self.decoder(torch.tanh(self.encoder(x))) - x).pow(2).sum() + self.row.pow(3).sum()


@pytest.mark.parametrize("start_method", METHODS)
def test_parameters_over_one_memory_stay_so_and_have_a_gradient_each(start_method, tmp_path):
    torch.manual_seed(2)
    model = TiedByStorage()
    plain = copy.deepcopy(model)
    plain.decoder.weight = nn.Parameter(plain.encoder.weight.data.t())
    plain.row = nn.Parameter(plain.encoder.weight.data[1])
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    with accelmgr.Manager(
        model, Numbers(), nprocs=1, runners__threads=1, start_method=start_method, checkpoint__directory=str(tmp_path)
    ) as manager:
        ours = torch.optim.SGD(model.parameters(), lr=0.1)
        assert model.decoder.weight.data_ptr() == model.encoder.weight.data_ptr()
        for batch in rows(3).split(1):
            manager.step(accumulate=False).raise_for_status()
            optimizer.zero_grad()
            plain(batch).backward()
            for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
                assert one.grad.shape == other.grad.shape, name
                close(one.grad, other.grad)
            ours.step()
            optimizer.step()
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            close(one.detach(), other.detach())
        written = save(manager)
        expected = {name: value.clone() for name, value in model.state_dict().items()}
    found = safetensors.torch.load_file(f"{written.path}/model.safetensors")
    assert {name: value.tolist() for name, value in found.items()} == {n: v.tolist() for n, v in expected.items()}
    again = TiedByStorage()
    with accelmgr.Manager(
        again, Numbers(), nprocs=1, start_method=start_method, checkpoint__resume=written.path
    ) as manager:
        assert all(torch.equal(again.state_dict()[name], value) for name, value in expected.items())
    assert again.decoder.weight.data_ptr() == again.encoder.weight.data_ptr()


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


def replace_by_assignment(model):
    model.linear.weight = nn.Parameter(torch.zeros(3, 4))


def replace_by_loading(model):
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)


def replace_by_a_new_head(model):
    model.linear = nn.Linear(4, 3)


def add_a_layer(model):
    model.more = nn.Linear(2, 2)


def remove_a_layer(model):
    del model.norm


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (replace_by_assignment, "'linear.weight' of the model was replaced"),
        (replace_by_loading, "of the model were replaced"),
        (replace_by_a_new_head, "'linear.weight', 'linear.bias' of the model were replaced"),
        (add_a_layer, "'more.weight', 'more.bias' of the model were added"),
        (remove_a_layer, "'norm.weight', 'norm.bias' of the model were removed"),
    ],
)
def test_a_parameter_that_is_no_longer_the_sessions_is_an_error_of_the_next_call(change, what, normed):
    normed.step().raise_for_status()
    model, before = normed.model, list(normed.model.parameters())
    modules, buffers = dict(model._modules), {m: dict(m._buffers) for m in model.modules()}
    owned = {m: dict(m._parameters) for m in model.modules()}
    change(model)
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
