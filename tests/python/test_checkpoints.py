"""Checks that training resumes bit for bit after save_checkpoint(optimizer=, scheduler=, extra=) and restore()."""

import collections
import math

import pytest
import torch
from saving import save
from torch import nn

import accelmgr
from accelmgr._serialization import checkpoint_values as _values

ROWS = [torch.randn(6, generator=torch.Generator().manual_seed(index)) for index in range(1000)]


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 2))

    def forward(self, x):
        return self.layers(x).pow(2).mean()


def model():
    torch.manual_seed(5)
    return Small()


OPTIMIZERS = {
    name: kind
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
    # A manager refuses these.
    if name not in ("LBFGS", "SparseAdam")
}


def make(kind, parameters):
    if kind.__name__ == "Muon":  # It takes only matrices.
        parameters = [parameter for parameter in parameters if parameter.dim() == 2]
    return kind(parameters, lr=0.01)


def test_every_optimizer_of_torch_goes_on_where_it_was(tmp_path):
    """One checkpoint holds all optimizers. Each has a copy of the parameters and steps it with the same gradients."""
    assert len(OPTIMIZERS) >= 11

    def optimizers(manager):
        copies = {}
        for name, kind in OPTIMIZERS.items():
            own = [parameter.detach().clone().requires_grad_() for parameter in manager.model.parameters()]
            copies[name] = (own, make(kind, own))
        return copies

    def step(manager, copies):
        manager.step(accumulate=False).raise_for_status()
        for own, optimizer in copies.values():
            for one, master in zip(own, manager.model.parameters(), strict=True):
                one.grad = master.grad.clone()
            optimizer.step()

    class All:
        def __init__(self, copies):
            self.copies = copies

        def state_dict(self):
            return {
                name: {"parameters": [p.detach() for p in own], "optimizer": optimizer.state_dict()}
                for name, (own, optimizer) in self.copies.items()
            }

        def load_state_dict(self, state):
            for name, (own, optimizer) in self.copies.items():
                with torch.no_grad():
                    for one, saved in zip(own, state[name]["parameters"], strict=True):
                        one.copy_(saved)
                optimizer.load_state_dict(state[name]["optimizer"])

    options = {"nprocs": 1, "start_method": "forkserver", "checkpoint__directory": str(tmp_path)}
    with accelmgr.Manager(model(), ROWS, **options) as manager:
        copies = optimizers(manager)
        assert manager.restore(optimizer=All(copies)) is None
        for _ in range(3):
            step(manager, copies)
        written = save(manager, optimizer=All(copies), extra={"seen": 3})
        for _ in range(2):
            step(manager, copies)
        expected = {name: [p.detach().clone() for p in own] for name, (own, _) in copies.items()}
    with accelmgr.Manager(model(), ROWS, checkpoint__resume=written.path, **options) as manager:
        copies = optimizers(manager)
        assert manager.restore(optimizer=All(copies)) == {"seen": 3}
        for _ in range(2):
            step(manager, copies)
        for name, (own, _) in copies.items():
            assert all(torch.equal(one, two) for one, two in zip(own, expected[name], strict=True)), name
        message = r"no state of the scheduler; save it with save_checkpoint\(scheduler="
        with pytest.raises(accelmgr.CheckpointError, match=message):
            manager.restore(scheduler=object())


def schedulers(optimizer):
    kinds = torch.optim.lr_scheduler
    return {
        "StepLR": kinds.StepLR(optimizer, 2),
        "MultiStepLR": kinds.MultiStepLR(optimizer, [2, 4]),
        "ExponentialLR": kinds.ExponentialLR(optimizer, 0.9),
        "CosineAnnealingLR": kinds.CosineAnnealingLR(optimizer, 10),
        "CosineAnnealingWarmRestarts": kinds.CosineAnnealingWarmRestarts(optimizer, 3),
        "LinearLR": kinds.LinearLR(optimizer),
        "PolynomialLR": kinds.PolynomialLR(optimizer, 10),
        "LambdaLR": kinds.LambdaLR(optimizer, lambda epoch: 0.95**epoch),
        "OneCycleLR": kinds.OneCycleLR(optimizer, 0.1, total_steps=20),
        "ReduceLROnPlateau": kinds.ReduceLROnPlateau(optimizer, patience=1),
    }


@pytest.mark.parametrize("name", schedulers(torch.optim.SGD([torch.zeros(1)], lr=0.1)))
def test_a_schedulers_state_survives_encoding(name):
    def make_pair():
        weight = torch.zeros(3, requires_grad=True)
        optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
        return optimizer, schedulers(optimizer)[name]

    def advance(optimizer, scheduler, steps):
        rates = []
        for _ in range(steps):
            optimizer.step()
            scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
            rates.append(optimizer.param_groups[0]["lr"])
        return rates

    one, other = make_pair(), make_pair()
    advance(*one, 3)
    tensors = {}
    states = _values.encode([one[0].state_dict(), one[1].state_dict()], "host", tensors)
    saved = _values.decode(states, tensors)
    other[0].load_state_dict(saved[0])
    other[1].load_state_dict(saved[1])
    assert advance(*one, 5) == advance(*other, 5)


def test_what_is_encoded_comes_back_as_it_was():
    value = {
        "plain": [1, 2.5, None, True, "text"],
        ("tuple", 1): {0: (1, (2,)), 1.5: {"<dict>": 1}},
        "numbers": [2**70, -(2**63), math.inf, -math.inf],
        "sets": [{1, 2}, frozenset({"a"}), collections.Counter({3: 2})],
    }
    tensors = {}
    found = _values.decode(_values.encode(value, "host", tensors), tensors)
    assert found == value and tensors == {}
    assert type(found["sets"][2]) is collections.Counter
    assert math.isnan(_values.decode(_values.encode(math.nan, "host", tensors), tensors))


def test_what_a_checkpoint_cannot_hold_is_named():
    with pytest.raises(accelmgr.CheckpointError, match="optimizer/state/0/hook is of type object"):
        _values.encode({"state": {0: {"hook": object()}}}, "optimizer", {})


def test_a_run_keeps_its_id_and_writes_to_its_own_directory_alone(tmp_path):
    options = {"nprocs": 1, "start_method": "forkserver", "checkpoint__directory": str(tmp_path)}
    with accelmgr.Manager(model(), ROWS, **options) as manager:
        manager.step().raise_for_status()
        written = save(manager)
        run_id = manager.run_id
        with accelmgr.Manager(model(), ROWS, checkpoint__resume="latest", **options) as other:
            with pytest.raises(accelmgr.CheckpointError, match="is in use by another manager of this process"):
                other.save_checkpoint()
    with accelmgr.Manager(model(), ROWS, **options) as manager:
        manager.step().raise_for_status()
        assert manager.run_id != run_id
        with pytest.raises(accelmgr.CheckpointError, match=f"{written.path}' is of another run"):
            manager.save_checkpoint()
    with accelmgr.Manager(model(), ROWS, checkpoint__resume="latest", **options) as manager:
        assert manager.run_id == manager.resumed.run_id == run_id
        assert '"nprocs": 1' in manager.resumed.configuration
        manager.step().raise_for_status()
        written = save(manager)
