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


class Small(nn.Linear):
    def __init__(self):
        super().__init__(6, 2)

    def forward(self, x):
        return super().forward(x).pow(2).mean()


OPTIMIZERS = {
    name: kind
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
    # A manager refuses these.
    if name not in ("LBFGS", "SparseAdam")
}


def goes_on(make, advance):
    """Whether two objects, of which the second one has the state of the first one by encoding, change as it alone."""
    one, other = make(), make()
    advance(*one, 3)
    tensors = {}
    states = _values.encode([dict(each.state_dict()) for each in one], "host", tensors)
    saved = {name: tensor.clone() for name, tensor in tensors.items()}
    for each, state in zip(other, _values.decode(states, saved), strict=True):
        each.load_state_dict(state)
    return advance(*one, 5) == advance(*other, 5)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_state_of_every_optimizer_of_torch_survives_encoding(kind):
    def make():
        layer = nn.Linear(6, 6, bias=False)  # A matrix, as Muon takes.
        return layer, OPTIMIZERS[kind](layer.parameters(), lr=0.01)

    def advance(layer, optimizer, steps):
        for step in range(steps):
            layer.weight.grad = torch.stack(ROWS[6 * step : 6 * step + 6])
            optimizer.step()
        return layer.weight.tolist()

    assert len(OPTIMIZERS) >= 11 and goes_on(make, advance)


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
    def make():
        optimizer = torch.optim.SGD([torch.zeros(3, requires_grad=True)], lr=0.1, momentum=0.9)
        return optimizer, schedulers(optimizer)[name]

    def advance(optimizer, scheduler, steps):
        rates = []
        for _ in range(steps):
            optimizer.step()
            scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
            rates.append(optimizer.param_groups[0]["lr"])
        return rates

    assert goes_on(make, advance)


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
    with accelmgr.Manager(Small(), ROWS, **options) as manager:
        manager.step().raise_for_status()
        written = save(manager)
        run_id = manager.run_id
        with accelmgr.Manager(Small(), ROWS, checkpoint__resume="latest", **options) as other:
            with pytest.raises(accelmgr.CheckpointError, match="is in use by another manager of this process"):
                other.save_checkpoint()
    with accelmgr.Manager(Small(), ROWS, **options) as manager:
        manager.step().raise_for_status()
        assert manager.run_id != run_id
        with pytest.raises(accelmgr.CheckpointError, match=f"{written.path}' is of another run"):
            manager.save_checkpoint()
    with accelmgr.Manager(Small(), ROWS, checkpoint__resume="latest", **options) as manager:
        assert manager.run_id == manager.resumed.run_id == run_id
        with pytest.raises(accelmgr.CheckpointError, match=r"save it with save_checkpoint\(scheduler="):
            manager.restore(scheduler=object())
        assert '"nprocs": 1' in manager.resumed.configuration
        manager.step().raise_for_status()
        written = save(manager)
