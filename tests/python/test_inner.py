"""Inner steps against the same optimizer in one process: the same bits, also when runners are killed."""

from __future__ import annotations

import copy
import importlib
import os
import signal
import threading
import time

import pytest
import torch
from conftest import descendants
from harm import Alarm
from interruptions import interrupted_at
from launching import kill
from programs import run
from saving import save
from torch import nn

import accelmgr
from accelmgr._updates.inner import Resident

pytestmark = pytest.mark.usefixtures("one_thread")

ELEMENTS = [(torch.randn(5, generator=torch.Generator().manual_seed(i)), torch.tensor(i % 3)) for i in range(400)]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.body = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8))
        self.head, self.unused = nn.Linear(8, 3), nn.Linear(2, 2)

    def forward(self, inputs, targets) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(self.body(inputs)), targets)


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, 0.01),
    "amsgrad": lambda p: torch.optim.Adam(p, 0.01, amsgrad=True, foreach=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, 0.01),
}


def manager_of(model: nn.Module, runners: int = 1, start_method: str = "fork", **options) -> accelmgr.Manager:
    return accelmgr.Manager(
        model,
        ELEMENTS,
        nprocs=runners,
        batch_size_per_device=4,
        start_method=start_method,
        runners__threads=1,
        **options,
    )


def in_host(
    make, steps: int, runners: int = 1, clip: float | None = None, rates: int = 40, of: type[nn.Module] = Net
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The same steps, with the optimizer in the host. rates: 0: the learning rate stays."""
    model = of()
    optimizer = make(model.parameters())
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, rates) if rates else None
    with manager_of(model, runners) as manager:
        for _ in range(steps):
            optimizer.zero_grad()
            manager.step().raise_for_status()
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
    return model, optimizer


def assert_same(one, other, exact: bool = True) -> None:
    """Models and their optimizers."""
    tolerance = {"rtol": 0.0, "atol": 0.0} if exact else {}
    for found, wanted in zip(one, other, strict=True):
        torch.testing.assert_close(found.state_dict(), wanted.state_dict(), **tolerance)


class Dies(torch.optim.SGD):
    """Kills its process in some of its steps, once in each place."""

    def __init__(self, parameters, folder, where) -> None:
        super().__init__(parameters, 0.1, momentum=0.9)
        self.folder, self.where = folder, where

    def step(self, closure=None):
        state = self.state[self.param_groups[0]["params"][0]]
        count = state.get("count", 0)
        self.may_die((count, "before"))
        super().step()
        state["count"] = count + 1
        self.may_die((count, "after"))

    def may_die(self, place: tuple[int, str]) -> None:
        if place in self.where and not (mark := self.folder / str(place)).exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def test_a_loop_that_is_left_has_the_parameters_of_its_steps():
    model = Net()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    with manager_of(model) as manager:
        for result in manager.steps(40, optimizer=optimizer):
            if result.step == 7:
                break
        after = copy.deepcopy(model.state_dict())
    wanted, _ = in_host(OPTIMIZERS["sgd"], 7, rates=0)
    assert all(torch.equal(value, after[name]) for name, value in wanted.state_dict().items())


@pytest.mark.parametrize("runners", [1, 2])
def test_a_runner_that_dies_while_it_applies_costs_no_step(tmp_path, runners):
    model = Net()
    where = {(0, "before"), (3, "after"), (4, "before"), (9, "before"), (13, "after")}
    optimizer = Dies(model.parameters(), tmp_path, where)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
    with manager_of(model, runners) as manager:
        numbers = []
        for result in manager.steps(15, optimizer=optimizer, sync_every=5):
            numbers.append(result.step)
            scheduler.step()
        assert numbers == list(range(1, 16))
        assert len(list(tmp_path.iterdir())) == len(where)
        wanted, reference = in_host(lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), 15, runners)
        for state in optimizer.state.values():
            state.pop("count", None)
        assert_same((model, optimizer), (wanted, reference))


class TakesLong(torch.optim.SGD):
    def step(self, closure=None):
        end = time.process_time() + 1.0
        while time.process_time() < end:
            torch.ones(10).sum()
        super().step()


@pytest.mark.parametrize("runners", [1, 2])
def test_an_optimizer_may_take_longer_than_an_aborted_step_and_than_the_call(runners):
    model = Net()
    optimizer = TakesLong(model.parameters(), 0.1)
    with manager_of(model, runners, abort_grace=0.2) as manager:
        for _ in range(2):
            result = manager.step(optimizer=optimizer, timeout=0.5)
            assert (result.status, result.repeated) == ("ok", 0)
        manager.sync()
        assert manager.statistics().replacements == 0
    assert_same((model, optimizer), in_host(lambda p: torch.optim.SGD(p, 0.1), 2, runners, rates=0))


def test_gradients_that_runners_still_apply_after_an_interrupt_stay_as_they_are(monkeypatch, alarms):
    step = Resident.step

    def slow(self, *arguments):
        end = time.process_time() + 1.5
        while time.process_time() < end:
            torch.ones(10).sum()
        return step(self, *arguments)

    monkeypatch.setattr(Resident, "step", slow)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with manager_of(model, 2) as manager:
        manager.step(optimizer=optimizer).raise_for_status()
        with pytest.raises(Alarm) as caught:
            signal.setitimer(signal.ITIMER_REAL, 0.75)
            manager.step(optimizer=optimizer)
        assert caught.value.step_result.counted
        manager.zero_grad()  # Loops that were written for an optimizer in the host do so.
        optimizer.zero_grad()
        manager.step(optimizer=optimizer).raise_for_status()
        manager.sync()
    assert_same((model, optimizer), in_host(lambda p: torch.optim.SGD(p, 0.1), 3, 2, rates=0))


@pytest.mark.parametrize("start_method", ["fork", "forkserver"])
@pytest.mark.parametrize("who", ["run1", "fork", "mgr"])
def test_steps_that_are_lost_between_two_syncs_are_made_again(who, start_method):
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
    with manager_of(model, 2, start_method) as manager:
        for number in range(1, 13):
            if number in (3, 8):
                (pid,) = [pid for pid, name in descendants().items() if name == f"accelmgr:{who}"]
                kill(pid)
            result = manager.step(optimizer=optimizer)
            if result.status == "manager_lost":
                manager.recover()
                result = manager.step(optimizer=optimizer)
            assert (result.status, result.step) == ("ok", number)
            if who != "fork":  # Runners live on without a fork server.
                assert result.repeated == (2 if number in (3, 8) else 0)
            scheduler.step()
            if number == 5:
                manager.sync()
        manager.sync()
        assert_same((model, optimizer), in_host(lambda p: torch.optim.AdamW(p, 0.01), 12, 2))


@pytest.mark.parametrize("runners", [1, 2])
def test_a_step_tells_the_norm_of_what_was_clipped(runners):
    models, norms = (Net(), Net()), []
    optimizers = [torch.optim.SGD(model.parameters(), 0.5) for model in models]
    with manager_of(models[0], runners) as manager, manager_of(models[1], runners) as other:
        for _ in range(5):
            result = manager.step(optimizer=optimizers[0], clip_grad_norm=0.2)
            assert result.to_dict()["grad_norm"] == result.grad_norm
            other.step(accumulate=False).raise_for_status()
            norms.append((result.grad_norm, float(nn.utils.clip_grad_norm_(models[1].parameters(), 0.2))))
            optimizers[1].step()
        assert manager.step(optimizer=optimizers[0]).grad_norm == 0
    assert all(inner == host > 0 for inner, host in norms)


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_a_lone_runner_that_keeps_its_gradients_finds_what_is_not_finite(where):
    class Overflows(Net):
        def forward(self, inputs, targets) -> torch.Tensor:
            loss = super().forward(inputs, targets)
            self.head.weight.register_hook(lambda gradient: gradient * float("inf"))
            return loss * float("nan") if where == "loss" else loss

    model = Overflows()
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    with manager_of(model) as manager:
        result = manager.step(optimizer=optimizer)
        assert (result.status, result.counted) == ("nonfinite", False)
        assert ("(loss nan)" if where == "loss" else "the gradient of 'head.weight' is not finite") in result.error
        manager.sync()
        for name, value in Net().state_dict().items():
            assert torch.equal(model.state_dict()[name], value), name


def test_the_gradient_of_a_lone_runner_that_overflows_when_it_is_divided_is_refused():
    class Weighs(Net):
        def forward(self, inputs, targets) -> dict[str, torch.Tensor]:
            return {"loss": super().forward(inputs, targets) * 1e10, "weight": torch.tensor(1e-30)}

    model = Weighs()
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    with manager_of(model, loss_scaling="sum_over(weight)") as manager:
        result = manager.step(optimizer=optimizer)
        assert (result.status, result.counted) == ("nonfinite", False)
        assert "a gradient is finite, but not when it is divided by the weight of the step" in result.error


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_what_the_host_writes_after_a_sync_goes_up(start_method):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    plain = Net()
    reference = torch.optim.SGD(plain.parameters(), 0.1, momentum=0.9)
    with manager_of(model, 1, start_method) as manager, manager_of(plain) as other:
        for number in range(1, 13):
            manager.step(optimizer=optimizer).raise_for_status()
            other.step().raise_for_status()
            reference.step()
            reference.zero_grad()
            if number == 2:
                with torch.no_grad(), pytest.raises(accelmgr.UsageError, match="2 inner steps ahead"):
                    model.head.weight.mul_(1)
                    manager.step(optimizer=optimizer)
                manager.sync()
            if number == 4:  # An outer step, without a new version of the tensor.
                manager.sync()
                for each in (model, plain):
                    each.head.weight.data.mul_(0.5)
                    with torch.no_grad():
                        each.head.bias.add_(0.5)
            if number == 6:  # The optimizer's state.
                manager.sync()
                for each in (optimizer, reference):
                    for state in each.state.values():
                        if state["momentum_buffer"] is not None:
                            state["momentum_buffer"].mul_(0.1)
            if number == 8:  # Another group.
                for each, net in ((optimizer, model), (reference, plain)):
                    each.param_groups[0]["params"].pop()
                    each.param_groups[0]["params"].pop()
                    each.add_param_group({"params": list(net.unused.parameters()), "lr": 0.01})
            if number == 10:  # An ordinary step between inner ones.
                manager.step().raise_for_status()
                optimizer.step()
                optimizer.zero_grad()
                other.step().raise_for_status()
                reference.step()
                reference.zero_grad()
        manager.sync()
        assert_same((model, optimizer), (plain, reference))
        assert torch.equal(manager.state_dict()["head.weight"], plain.head.weight)


def test_a_checkpoint_goes_on_with_either_kind_of_step(tmp_path):
    options = {"checkpoint__directory": str(tmp_path), "checkpoint__resume": "latest"}
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    with manager_of(model, **options) as manager:
        list(manager.steps(5, optimizer=optimizer))
        manager.step(optimizer=optimizer).raise_for_status()
        save(manager, optimizer=optimizer)
        assert manager.synced_step == 6
    again = Net()
    goes_on = torch.optim.AdamW(again.parameters(), 0.01)
    with manager_of(again, **options) as manager:
        manager.restore(optimizer=goes_on)
        list(manager.steps(4, optimizer=goes_on))
    assert_same((again, goes_on), in_host(OPTIMIZERS["adamw"], 10, rates=0))


class Averaging(torch.optim.SGD):
    """hivemind.Optimizer is one of torch's kind, too, and has entries in its state that are none of a parameter."""

    __module__ = "hivemind.optim.optimizer"


def test_an_optimizer_that_runners_cannot_have_is_refused():
    model = Net()
    with manager_of(model) as manager:
        with pytest.raises(accelmgr.UsageError, match="LBFGS evaluates the loss several times"):
            manager.step(optimizer=torch.optim.LBFGS(model.parameters()))
        with pytest.raises(accelmgr.UsageError, match="What averages with others stays in the host"):
            manager.step(optimizer=Averaging(model.parameters(), 0.1))
        with pytest.raises(accelmgr.UsageError, match="not a parameter of this manager"):
            manager.step(optimizer=torch.optim.SGD(copy.deepcopy(model).parameters(), 0.1))
        with pytest.raises(accelmgr.UsageError, match="clip_grad_norm is for inner steps"):
            manager.step(clip_grad_norm=1.0)
        assert manager.step().status == "ok"


class DiesOnce(Net):
    """Dies in forward() of the process whose number is in the file."""

    def __init__(self, file) -> None:
        super().__init__()
        self.file = file

    def forward(self, inputs, targets) -> torch.Tensor:
        if self.file.exists() and self.file.read_text() == str(os.getpid()):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(inputs, targets)


class Scaled(torch.optim.SGD):
    """It keeps more than groups and state, and looks at hooks."""

    def __init__(self, parameters, scale) -> None:
        super().__init__(parameters, 0.1, momentum=0.9)
        self.scale = scale
        self.register_step_pre_hook(Scaled.note)

    @staticmethod
    def note(optimizer, arguments, keywords) -> None:
        optimizer.noted = True

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and self.noted:
                    parameter.grad.mul_(self.scale)
        super().step()


def scaled(parameters):
    """Each runner makes the whole update."""
    return Scaled(parameters, 0.25)


@pytest.mark.parametrize("start_method", ["fork", "forkserver"])
@pytest.mark.parametrize("killed", [1, 2])
def test_what_a_survivor_has_is_not_made_again(killed, start_method):
    model = Net()
    optimizer = scaled(model.parameters())
    with manager_of(model, 3, start_method) as manager:
        for number in range(1, 11):
            if number in (4, 8):
                for runner in manager.statistics().runners[:killed]:
                    kill(runner.pid)
            result = manager.step(optimizer=optimizer)
            assert (result.status, result.step, result.repeated) == ("ok", number, 0)
            assert manager.synced_step == (0 if number < 4 else 3 if number < 8 else 7)
        manager.sync()
        assert_same((model, optimizer), in_host(scaled, 10, 3, rates=0))


@pytest.mark.parametrize("start_method", ["fork", "forkserver"])
@pytest.mark.parametrize("make", [scaled, OPTIMIZERS["adamw"]], ids=["whole", "divided"])
def test_a_runner_that_dies_in_a_step(make, start_method, tmp_path):
    model = DiesOnce(tmp_path / "dies")
    optimizer = make(model.parameters())
    with manager_of(model, 2, start_method) as manager:
        for number in range(1, 8):
            if number == 4:
                model.file.write_text(str(manager.statistics().runners[1].pid))
            result = manager.step(optimizer=optimizer)
            repeated = 3 if number == 4 and make is not scaled else 0  # The other has only its part of the state.
            assert (result.status, result.step, result.repeated) == ("ok", number, repeated)
        manager.sync()
        assert_same((model, optimizer), in_host(make, 7, 2, rates=0))


def test_an_optimizer_that_cannot_be_sent_is_refused():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer.register_step_post_hook(lambda *_: None)
    optimizer.lock = threading.Lock()
    with manager_of(model, 1, "forkserver") as manager:
        with pytest.raises(accelmgr.UsageError, match=r"no forks of this process: optimizer\.lock .*'_thread.lock'"):
            manager.step(optimizer=optimizer)
        del optimizer.lock
        assert manager.step(optimizer=optimizer).status == "ok"


@pytest.mark.parametrize("call, stride", [("step", 9), ("sync", 5)])
def test_a_call_that_is_interrupted_loses_no_step(call, stride):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    with manager_of(model) as manager:
        calls = {"step": lambda: manager.step(optimizer=optimizer), "sync": manager.sync}
        manager.step(optimizer=optimizer).raise_for_status()
        for place in range(0, 80 * stride, stride):
            if call == "sync":
                manager.step(optimizer=optimizer).raise_for_status()
            where, _ = interrupted_at(place, calls[call])
            if not where:
                break
        assert place > 20 * stride
        manager.sync()
        steps = manager.statistics().steps
        assert manager.synced_step == steps
    assert_same((model, optimizer), in_host(lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), steps, rates=0))


class Raises(torch.optim.SGD):
    def step(self, closure=None):
        count = self.state[self.param_groups[0]["params"][0]].setdefault("count", torch.zeros(()))
        count += 1
        if count == 3:
            raise RuntimeError("the third is not to be had")
        super().step()


def test_what_the_optimizer_raises_is_the_error_of_the_next_step_or_sync():
    for asks in ("step", "sync"):
        model = Net()
        optimizer = Raises(model.parameters(), 0.1)
        with manager_of(model) as manager:
            for _ in range(3):
                manager.step(optimizer=optimizer).raise_for_status()
            with pytest.raises(accelmgr.ModelError, match="failed in inner step 3 .* the third is not to be had"):
                manager.sync() if asks == "sync" else manager.step(optimizer=optimizer).raise_for_status()
            manager.stop()


def test_the_end_of_a_block_syncs_and_stop_warns(caplog):
    def sgd(parameters) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, 0.1)

    model, stopped = Net(), Net()
    optimizer = sgd(model.parameters())
    with manager_of(model, 2) as manager:
        manager.step(optimizer=optimizer).raise_for_status()
    assert_same((model, optimizer), in_host(sgd, 1, 2, rates=0))
    manager = manager_of(stopped)
    manager.step(optimizer=sgd(stopped.parameters())).raise_for_status()
    manager.stop()
    assert "1 inner steps since the last sync are lost" in caplog.text


ON_DEVICE = """
import sys, torch
from cuda_runners import install, sent
from test_inner import OPTIMIZERS, Net, assert_same, in_host, manager_of
torch.set_num_threads(1)
runners = int(sys.argv[3])
for name in sys.argv[1].split():
    make, model = OPTIMIZERS[name], Net()
    optimizer = make(model.parameters())
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
    options = {"device": "cuda", "runners__oversubscribe": True, "runners__cuda_graph": sys.argv[2]}
    with sent(install()), manager_of(model, runners, sys.argv[4], **options) as manager:
        for result in manager.steps(8, optimizer=optimizer, clip_grad_norm=0.5, sync_every=3):
            scheduler.step()
    assert_same((model, optimizer), in_host(make, 8, runners, clip=0.5), exact=False)
print("the same")
"""


@pytest.mark.parametrize(
    "graphs, runners, start_method",
    [("off", 1, "fork"), ("off", 2, "fork"), ("auto", 1, "fork"), ("auto", 2, "fork"), ("off", 1, "spawn")],
)
def test_on_a_device_the_parameters_stay_there(tmp_path, graphs, runners, start_method):
    """The device is the fake of cuda_runners.py, which the libraries find that a new process loads."""
    importlib.import_module("cuda_runners")  # Sets where they look.
    code, out, err = run(
        "-c", ON_DEVICE, "sgd adamw amsgrad adafactor", graphs, str(runners), start_method, cwd=tmp_path
    )
    assert (code, out) == (0, "the same\n"), err


class Drawn(torch.optim.SGD):
    """Draws random numbers, which differ from runner to runner, for one parameter."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        chosen = self.param_groups[0]["params"][1]
        chosen += torch.rand_like(chosen)


def test_an_optimizer_that_computes_otherwise_in_each_runner_is_told_with_the_parameter():
    model = Net()
    told = pytest.raises(accelmgr.SessionError, match=r"parameter 'body\.0\.bias' has other values in rank 1")
    with told, manager_of(model, 2) as manager:  # Its end syncs.
        manager.step(optimizer=Drawn(model.parameters(), 0.1)).raise_for_status()


def test_inner_steps_do_not_round_and_say_which_parameter_they_would():
    model = Net()
    with manager_of(model, runners__parameters="bf16") as manager:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        result = manager.step(optimizer=optimizer)
        with pytest.raises(accelmgr.ModelError, match=r"bf16: they would update a rounded copy of 'body\.0\.weight'"):
            result.raise_for_status()
