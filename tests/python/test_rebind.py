"""Models that get other parameters while they are trained (`Manager.rebind()`)."""

from __future__ import annotations

import threading

import pytest
import torch
from saving import save
from torch import nn

import accelmgr


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2)])
        self.dropout = nn.Dropout(0.5)
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x: torch.Tensor, number: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            x = self.dropout(layer(x))
        return {"loss": self.norm(x).square().mean() + x.mean(), "number": number.double().mean()}


def elements(count: int = 64):
    generator = torch.Generator().manual_seed(1)
    return [{"x": torch.randn(2, generator=generator), "number": torch.tensor(i)} for i in range(count)]


def start(model: nn.Module, dataset=None, **options) -> accelmgr.Manager:
    options = {"nprocs": 2, "batch_size_per_device": 2, **options}
    return accelmgr.Manager(model, elements() if dataset is None else dataset, **options)


def made(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def losses(manager: accelmgr.Manager, count: int) -> list[tuple[float, float]]:
    return [(result.loss, result.scalars["number"]) for result in manager.steps(count)]


@pytest.mark.parametrize("start_method", ["spawn", "fork", "forkserver"])
def test_nothing_changes_for_what_stays(start_method):
    """Steps, elements, dropout, gradients and statistics of BatchNorm go on as without rebind()."""
    expected, model = made(), made()
    with start(expected, start_method=start_method, buffers={"policy": "rank0"}, nprocs=1) as manager:
        wanted = losses(manager, 6)
    with start(model, start_method=start_method, buffers={"policy": "rank0"}, nprocs=1) as manager:
        found = losses(manager, 2)
        run, weight, gradient = manager.run_id, model.layers[0].weight, model.layers[0].weight.grad.clone()
        manager.rebind()
        assert manager.statistics().steps == 2
        assert manager.run_id == run
        assert model.layers[0].weight is weight and torch.equal(weight.grad, gradient)
        found += losses(manager, 2)
        manager.rebind()
        found += losses(manager, 2)
        assert manager.statistics().elements == 12
    assert found == wanted
    for tensors_of in (nn.Module.state_dict, lambda model: [parameter.grad for parameter in model.parameters()]):
        torch.testing.assert_close(tensors_of(model), tensors_of(expected), rtol=0, atol=0)


def test_new_parameters_are_trained_and_removed_ones_are_left_alone():
    model = made()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with start(model) as manager:
        manager.step()
        optimizer.step()
        state = optimizer.state[model.layers[0].weight]["exp_avg"].clone()
        model.layers.append(nn.Linear(2, 2, bias=False))
        with pytest.raises(accelmgr.ModelError, match=r"rebind\(\)"):
            manager.step()
        manager.rebind()
        optimizer.add_param_group({"params": list(model.layers[1].parameters())})
        assert torch.equal(optimizer.state[model.layers[0].weight]["exp_avg"], state)
        assert model.layers[1].weight.grad is None
        manager.step().raise_for_status()
        assert model.layers[1].weight.grad.any()
        optimizer.step()
        gone = model.layers.pop(1)
        manager.rebind()
        before = gone.weight.detach().clone()
        assert [name for name, _ in manager.named_parameters()] == [name for name, _ in model.named_parameters()]
        manager.step().raise_for_status()
        assert torch.equal(gone.weight, before)
        assert manager.statistics().steps == 3


class Wrapped(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        outputs = self.inner(**inputs)
        return {**outputs, "loss": outputs["loss"] * self.scale}


def test_another_module_with_the_same_parameters():
    model = made()
    with start(model) as manager:
        losses(manager, 1)
        wrapped = Wrapped(model)
        manager.rebind(wrapped)
        assert manager.model is wrapped
        losses(manager, 1)
        assert wrapped.scale.grad.any()
        manager.stop()
        with start(model) as other:
            assert other.step().ok, "the former model is free"


def test_a_dataset_that_only_this_process_can_read_goes_on():
    """Its elements are read by a thread of this process, once."""
    model = made()
    lock = threading.Lock()  # Cannot be pickled.

    def generate():
        for element in elements(200):
            with lock:
                yield element

    with start(model, generate()) as manager:
        numbers = [number for _, number in losses(manager, 5)]
        for _ in range(3):
            manager.rebind()
            numbers += [number for _, number in losses(manager, 5)]
    assert numbers == [1.5 + 4 * step for step in range(20)]


def test_checkpoints_go_on(tmp_path):
    model = made()
    with start(model, checkpoint={"directory": str(tmp_path)}) as manager:
        losses(manager, 2)
        save(manager)
        run = manager.run_id
        model.layers.append(nn.Linear(2, 2))
        manager.rebind()
        losses(manager, 1)
        manager.save_checkpoint()
        assert [(written.step, written.error) for written in manager.checkpoints_written(30)] == [(3, "")]
    options = {"directory": str(tmp_path), "resume": "latest"}
    with start(model, checkpoint=options) as manager:
        assert (manager.resumed.step, manager.run_id) == (3, run)
        first = losses(manager, 1)
        model.layers.pop(1)
        manager.rebind()
        assert manager.statistics().steps == 4, "and not those of the checkpoint"
        assert manager.resumed.step == 3
        second = losses(manager, 1)
    assert [number for _, number in first + second] == [13.5, 17.5]


def test_the_size_of_the_team_and_what_was_written_here_go_on():
    model = made()
    with start(model, runners={"max_runners": 3}) as manager:
        losses(manager, 1)
        manager.resize(3)
        losses(manager, 1)
        model.norm.running_mean.fill_(7.0)
        model.layers[0].weight.grad = None
        manager.rebind()
        assert len(manager.statistics().runners) == 3
        assert model.layers[0].weight.grad is None
        assert manager.buffers()["norm.running_mean"].tolist() == [7.0, 7.0]
        assert losses(manager, 1)[0][1] == 12.5, "elements 10 to 15"
        manager.rebind()
        assert len(manager.statistics().runners) == 3


def test_a_model_that_cannot_be_trained_leaves_the_manager_as_it_was():
    model = made()
    with start(model, start_method="forkserver") as manager:
        losses(manager, 1)
        pids = [runner.pid for runner in manager.statistics().runners]
        unfit = made()
        unfit.eight = nn.Parameter(torch.ones(1).to(torch.float8_e4m3fn))
        with pytest.raises(accelmgr.ModelError, match="float8_e4m3fn"):
            manager.rebind(unfit)
        model.lock = threading.Lock()
        with pytest.raises(accelmgr.ModelError, match=r"model\.lock"):
            manager.rebind()
        del model.lock
        assert losses(manager, 1)[0][1] == 5.5
        assert [runner.pid for runner in manager.statistics().runners] == pids


class Unmakable(nn.Module):
    """Fails when a runner gets it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def __setstate__(self, state: dict) -> None:
        raise ArithmeticError("cannot be made")


def test_after_a_failed_start_another_one_goes_on_there():
    model = made()
    with start(model, start_method="forkserver") as manager:
        losses(manager, 2)
        model.extra = Unmakable()
        with pytest.raises(accelmgr.ModelError, match="cannot be made"):
            manager.rebind()
        with torch.no_grad():
            model.layers[0].weight += 1  # It has memory of its own.
        del model.extra
        manager.start()
        assert manager.statistics().steps == 2
        assert losses(manager, 1)[0][1] == 9.5


def test_who_cannot_rebind():
    with (
        accelmgr.Manager("mlp", "synthetic", nprocs=1) as manager,
        pytest.raises(accelmgr.UsageError, match="no module of this process"),
    ):
        manager.rebind()
    manager = start(made())
    manager.stop()
    with pytest.raises(accelmgr.UsageError, match="after stop"):
        manager.rebind()
