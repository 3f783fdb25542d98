"""Checks that the classes of the original TPUManager are there, with the meaning that they had."""

import inspect
import os
import pickle
import signal
import threading

import pytest
import torch
from gate import Count, Told
from oracle import Oracle, assert_equal
from programs import BOUND_S, run_script
from torch import nn

import accelmgr
from accelmgr.compat.tpu_manager import QueueDataset, TPUDataManager, TPUManager, TPUSynchronizer


class Tied(nn.Module):
    """Has a method tie_weights(), as models of transformers have."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        self.bias = nn.Parameter(torch.zeros(3))
        self.tie_weights()

    def tie_weights(self):
        self.head.weight = self.embed.weight

    def forward(self, x):
        return {"loss": ((self.head(torch.tanh(self.embed(x))) + self.bias) ** 2).mean()}


def rows():
    generator = torch.Generator().manual_seed(4)
    while True:
        yield {"x": torch.randn(3, generator=generator)}


class Rows:
    def __iter__(self):
        return rows()


SHAPE = {"nprocs": 2, "batch_size_per_device": 2, "grad_accumulation_steps": 2}


@pytest.fixture(scope="module")
def pair():
    torch.manual_seed(6)
    model = Tied()
    oracle = Oracle(model, rows(), **SHAPE)
    manager = TPUManager(model, Rows(), **SHAPE, prefetch=5, seed_base=11, start=True)
    yield manager, oracle
    manager.terminate()
    assert not manager.is_alive()


def test_it_is_exported_and_has_the_original_signature():
    assert accelmgr.TPUManager is TPUManager
    parameters = inspect.signature(TPUManager).parameters
    names = "collate_fn nprocs prefetch batch_size_per_device grad_accumulation_steps seed_base"
    defaults = dict(zip(names.split(), [None, 8, 16, 1, 1, 42], strict=True))
    required = dict.fromkeys(["model", "dataset", "start"], inspect.Parameter.empty)
    # The original has no `device`: its devices were those of XLA.
    assert {name: one.default for name, one in parameters.items()} == defaults | required | {"device": None}
    assert list(parameters) == ["model", "dataset", *defaults, "start", "device"]
    with pytest.raises(TypeError, match="start"):
        TPUManager(Tied(), Rows())


def test_a_step_gives_loss_and_samples_and_its_values_and_events_say_so(zeroed):
    manager, oracle = zeroed
    result = manager.step()
    loss, samples = result
    assert (result[0], result[1]) == (loss, samples) and len(result) == 2  # The original returned a tuple.
    assert loss == pytest.approx(oracle.step(), rel=1e-5)
    assert samples == 8
    assert manager.loss_accumulated.value == loss and manager.gradients_accumulated.value == 8
    assert manager.step_finished.is_set() and manager.step_finished.wait(0) and not manager.step_triggered.is_set()
    gradients = manager.get_aggregated_gradients()
    assert isinstance(gradients, list) and len(gradients) == len(list(manager.model.parameters())) == 2
    assert_equal(gradients, oracle.gradients())
    assert [g.data_ptr() for g in gradients] == [p.grad.data_ptr() for p in manager.model.parameters()]


def test_a_step_that_is_triggered_by_hand(zeroed):
    manager, oracle = zeroed
    manager.step_finished.clear()
    manager.step_triggered.set()
    assert manager.step_finished.wait(60)
    assert manager.gradients_accumulated.value == 8
    assert manager.loss_accumulated.value == pytest.approx(oracle.step(), rel=1e-5)
    assert_equal(manager.get_aggregated_gradients(), oracle.gradients())
    assert manager.step_triggered.wait(0) is False


def wait_and_be_killed(event):
    """Forks a child that is killed inside event.wait(). Returns when it has ended."""
    child = os.fork()
    if child == 0:

        def kill(number, frame):
            if frame.f_code.co_name == "wait":
                os.kill(os.getpid(), signal.SIGKILL)

        signal.signal(signal.SIGALRM, kill)
        signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
        event.wait(60)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def test_a_forked_child_sees_that_a_step_was_made_and_one_that_is_killed_holds_up_none(tmp_path):
    manager = TPUManager(Told(tmp_path), Count(), nprocs=1, start=True)
    begun, begins = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(begins, b"1")
        samples = manager.gradients_accumulated.value if manager.step_finished.wait(60) else -1
        os._exit(samples)
    os.read(begun, 1)
    assert manager.step().samples == 1
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    os.close(begun), os.close(begins)
    manager.step_finished.clear()
    assert not manager.step_finished.is_set() and not manager.step_finished.wait(-1)
    with pytest.raises(accelmgr.UsageError, match="only by fork"):
        pickle.dumps(manager.step_finished)
    wait_and_be_killed(manager.step_finished)
    assert manager.step().ok
    assert manager.step_finished.is_set() and manager.step_finished.wait(60)
    manager.terminate()


def test_parameters_are_to_be_loaded_until_a_step_has_them(zeroed):
    manager, oracle = zeroed
    assert manager.should_load_parameters.value is False
    manager.update_model_parameters(torch.full_like(p, 0.25) for p in manager.model.parameters())
    assert manager.should_load_parameters.value is True
    for parameter in oracle.model.parameters():
        parameter.data.fill_(0.25)
    assert manager.step().loss == pytest.approx(oracle.step(), rel=1e-5)
    assert manager.should_load_parameters.value is False
    assert_equal(manager.get_aggregated_gradients(), oracle.gradients())


def test_the_lock_is_held_by_the_methods_that_say_so(zeroed, monkeypatch):
    manager, _ = zeroed
    monkeypatch.setattr(manager, "_patience_s", 0.01)
    with manager.lock:
        for call in (
            manager.zero_grad,
            manager.get_aggregated_gradients,
            lambda: manager.update_model_parameters(manager.model.parameters()),
            manager.step,
        ):
            with pytest.raises(accelmgr.UsageError, match="waited 0.01 s for the manager's lock"):
                call()
    manager.zero_grad()


def test_gradients_that_are_asked_for_during_a_step_are_those_after_it(tmp_path):
    with TPUManager(Told(tmp_path), Count(), nprocs=2, start=True) as manager:
        gate, results, given = manager.model.gate, [], []
        stepping = threading.Thread(target=lambda: results.append(manager.step()))
        asking = threading.Thread(target=lambda: given.append(manager.get_aggregated_gradients()[0].clone()))
        gate.shut()
        stepping.start()
        with gate.held():
            asking.start()
            manager.model.tell("die")
        stepping.join()
        asking.join()
        assert (results[0].status, results[0].tries, results[0].samples) == ("ok", 2, 2)
        assert given[0].tolist() == [0.25, 0.5], "of elements 0 and 1, each once, although a runner died"


def test_who_holds_the_lock_and_calls_waits_as_long_as_a_step_may_take(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELMGR_STEP_TIMEOUT", "0.25")
    manager = TPUManager(Told(tmp_path), Count(), nprocs=1, start=False)
    with manager.lock, pytest.raises(accelmgr.UsageError, match=r"waited 0\.25 s for the manager's lock"):
        manager.step()


def test_it_is_a_process_and_has_what_was_passed(pair):
    manager, _ = pair
    assert (manager.nprocs, manager.batch_size_per_device, manager.grad_accumulation_steps) == (2, 2, 2)
    assert (manager.prefetch, manager.seed_base, manager.collate_fn) == (5, 11, None)
    assert manager.is_alive() and manager.exitcode is None and manager.daemon
    assert manager.pid == manager.ident == manager.statistics().manager_pid
    assert manager.name.startswith("TPUManager-")
    manager.join(timeout=0.01)
    assert manager.is_alive()
    with pytest.raises(accelmgr.UsageError, match="ends with this process"):
        manager.daemon = False
    data = manager._data_manager
    assert isinstance(data.dataset, Rows) and data.nprocs == 2
    assert [(one.rank, one.maxsize) for one in data.device_queues] == [(0, 5), (1, 5)]


def test_what_its_processes_ran_says_what_to_use_instead(pair):
    manager, _ = pair
    with pytest.raises(accelmgr.UsageError, match=r"runner\(1\) is what a runner process does; start\(\) starts 2"):
        manager.runner(1)
    with pytest.raises(accelmgr.UsageError, match=r"call start\(\), which starts it"):
        manager.run()
    data = manager._data_manager
    for call in (data.get_device_dataloader, data._load_data_into_queues, data.device_queues[0].get):
        with pytest.raises(accelmgr.UsageError, match=r"TPUDataManager\(dataset, nprocs\) shards a dataset in this"):
            call()
    manager.step_finished.clear()
    manager._mark_step_finished(0.5)
    assert (manager.step_finished.is_set(), manager.loss_accumulated.value, manager.gradients_accumulated.value) == (
        True,
        0.5,
        8,
    )


def test_the_synchronizer_is_over_the_session(zeroed):
    manager, oracle = zeroed
    synchronizer = manager._synchronizer
    assert synchronizer.master_model is manager.model
    manager.step()
    oracle.step()
    before = [gradient.clone() for gradient in manager.get_aggregated_gradients()]
    replica = synchronizer.get_device_model_replica(torch.device("cpu"))
    assert replica.head.weight is replica.embed.weight and replica is not manager.model
    assert not any(p.grad.any() for p in replica.parameters())
    assert_equal(replica.parameters(), manager.model.parameters())
    # The replica's gradients are added to the master's, or replace them.
    replica(**next(rows()))["loss"].backward()
    own = [p.grad.clone() for p in replica.parameters()]
    synchronizer.aggregate_grads_on_host(replica, add=True)
    assert_equal(manager.get_aggregated_gradients(), [one + other for one, other in zip(before, own, strict=True)])
    synchronizer.aggregate_grads_on_host(replica, add=False)
    assert_equal([p.grad for p in manager.model.parameters()], own)
    # New parameters go to the master, and from there to the replica.
    synchronizer.set_host_parameters([torch.full_like(p, 0.5) for p in replica.parameters()])
    assert all((p == 0.5).all() for p in manager.model.parameters())
    assert not any((p == 0.5).all() for p in replica.parameters())
    synchronizer.send_params_to_device(replica)
    assert all((p == 0.5).all() for p in replica.parameters())
    for parameter in oracle.model.parameters():
        parameter.data.fill_(0.5)
    assert manager.step(accumulate=False).loss == pytest.approx(oracle.step(), rel=1e-5)


def test_a_synchronizer_by_itself():
    model = Tied()
    synchronizer = TPUSynchronizer(model)
    assert synchronizer.master_model is model
    assert all(p.is_shared() and p.grad.is_shared() for p in model.parameters())
    replica = synchronizer.get_device_model_replica("cpu", tie_weights=False)
    replica.bias.grad.fill_(1)
    synchronizer.aggregate_grads_on_host(replica, add=True)
    assert model.bias.grad.tolist() == [1, 1, 1]
    for gradient, parameter in zip(synchronizer.get_aggregated_gradients(), model.parameters(), strict=True):
        assert gradient is parameter.grad


@pytest.mark.parametrize("strict", [True, False])
def test_assign_checks_before_it_writes(strict):
    synchronizer = TPUSynchronizer(nn.Linear(2, 2))
    target = [torch.zeros(2), torch.zeros(3)]
    for source in ([torch.ones(2)], [torch.ones(2)] * 3, [torch.ones(2), torch.ones(1)]):
        with pytest.raises(accelmgr.ModelError, match="nothing was changed"):
            synchronizer._assign(source=source, target=target, add=False, strict=strict)
    assert not any(one.any() for one in target)
    doubles = [torch.ones(2), torch.ones(3, dtype=torch.float64)]
    if strict:
        with pytest.raises(accelmgr.ModelError, match="source tensor 1 is torch.float64"):
            synchronizer._assign(source=doubles, target=target, add=False, strict=True)
        return
    synchronizer._assign(source=iter(doubles), target=iter(target), add=False)
    synchronizer._assign(source=doubles, target=target, add=True)
    assert [one.tolist() for one in target] == [[2, 2], [2, 2, 2]]


def test_a_data_manager_by_itself_shards_in_turn_and_its_end_is_no_hang():
    data = TPUDataManager(range(11), 3, master_prefetch=4)
    loaders = [data.get_device_dataloader(device, batch_size=2) for device in range(3)]
    assert [[batch.tolist() for batch in loader] for loader in loaders] == [
        [[0, 3], [6, 9]],
        [[1, 4], [7, 10]],
        [[2, 5], [8]],
    ]
    data._loader_thread.join(60)
    assert not data._loader_thread.is_alive()


def test_a_queue_that_nobody_empties_keeps_the_others_from_nothing_they_hold():
    data = TPUDataManager(range(100), 2, master_prefetch=3)
    own = iter(QueueDataset(data.device_queues[1], timeout=60))
    assert [next(own) for _ in range(3)] == [1, 3, 5]
    with pytest.raises(accelmgr.DataError, match="no element came within 0.01 s"):
        next(iter(QueueDataset(data.device_queues[1], timeout=0.01)))
    data.close()


class Stuck:
    """A dataset that gives `count` elements and then blocks."""

    def __init__(self, count):
        self.count, self.asked, self.go_on = count, threading.Event(), threading.Event()

    def __iter__(self):
        yield from range(self.count)
        self.asked.set()
        self.go_on.wait(60)


def test_a_data_manager_that_is_closed_ends_who_waits_for_an_element_and_a_full_queue():
    dataset, elements = Stuck(1), []
    data = TPUDataManager(dataset, 1)
    queue = QueueDataset(data.device_queues[0])
    reading = threading.Thread(target=lambda: elements.extend(iter(queue)), daemon=True)
    reading.start()
    full = Stuck(2)
    data_of_full = TPUDataManager(full, 1, master_prefetch=2)
    for each in (dataset, full):
        assert each.asked.wait(60)
    data.close()
    data_of_full.close()
    reading.join(60)
    assert not reading.is_alive() and elements in ([0], [])
    assert list(iter(QueueDataset(data_of_full.device_queues[0], timeout=60))) == [1]
    data.close()
    for each, of in ((dataset, data), (full, data_of_full)):
        each.go_on.set()
        of._loader_thread.join(60)
        assert not of._loader_thread.is_alive()


@pytest.mark.parametrize("error", [LookupError, SystemExit])
def test_a_dataset_that_fails_in_the_host_is_an_error_of_every_queue(error):
    def broken():
        yield 1
        raise error("no more of them")

    data = TPUDataManager(broken(), 2)
    for device in range(2):
        with pytest.raises(accelmgr.DataError, match=f"{error.__name__}: no more of them"):
            for element in QueueDataset(data.device_queues[device]):
                assert element == 1
    assert len(QueueDataset(data.device_queues[0])) == 10**12
    data.close()


def test_its_life(tmp_path):
    model = Told(tmp_path)
    manager = TPUManager(model, Count(), nprocs=2, start=False)
    assert (manager.pid, manager.exitcode, manager.is_alive()) == (None, None, False)
    with pytest.raises(accelmgr.UsageError, match="not started"):
        manager.join()
    with pytest.raises(accelmgr.UsageError, match="was not started"):
        manager.step()
    manager.start()
    # The events during a step, while a thread waits for its end.
    model.gate.shut()
    manager.step_triggered.set()
    outcome = []
    waiting = threading.Thread(target=lambda: outcome.append(manager.step_finished.wait(60)))
    waiting.start()
    with model.gate.held():
        assert not manager.step_finished.is_set()
        assert not manager.step_triggered.is_set(), "a runner has begun"
        assert manager.gradients_accumulated.value == 0 and manager.loss_accumulated.value == 0
    waiting.join()
    assert outcome == [True] and manager.gradients_accumulated.value == 2
    # terminate() while another thread is in step().
    model.gate.shut()
    results = []
    stepping = threading.Thread(target=lambda: results.append(manager.step()))
    stepping.start()
    with model.gate.held():
        manager.terminate()
    stepping.join()
    assert results[0].status == "manager_lost" and manager.gradients_accumulated.value == 0
    manager.join()
    manager.terminate()
    assert not manager.is_alive() and manager.exitcode in (-signal.SIGTERM, -signal.SIGKILL)
    with pytest.raises(accelmgr.UsageError, match=r"after stop\(\)"):
        manager.step()


class Leaves(Exception):
    pass


@pytest.mark.parametrize("leaves", [False, True], ids=["returns", "raises"])
@pytest.mark.parametrize("call", ["terminate", "kill"])
def test_a_signal_handler_ends_it_under_the_step_that_it_interrupts(tmp_path, monkeypatch, call, leaves):
    monkeypatch.setenv("ACCELMGR_STEP_TIMEOUT", "60")
    manager = TPUManager(Told(tmp_path), Count(), nprocs=1, start=True)
    over = threading.Event()

    def handle(number, frame):
        getattr(manager, call)()
        if leaves:
            raise Leaves

    def interrupt():
        """While a runner blocks at the gate."""
        with manager.model.gate.held():
            signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)
            over.wait(BOUND_S)

    manager.model.gate.shut()
    previous = signal.signal(signal.SIGUSR1, handle)
    interrupting = threading.Thread(target=interrupt)
    interrupting.start()
    try:
        if leaves:
            with pytest.raises(Leaves):
                manager.step()
        else:
            assert manager.step().status == "manager_lost"
    finally:
        over.set()
        interrupting.join()
        signal.signal(signal.SIGUSR1, previous)
    assert not manager.is_alive() and manager.exitcode in (-signal.SIGTERM, -signal.SIGKILL)
    with pytest.raises(accelmgr.UsageError, match=r"after stop\(\)"):
        manager.step()


@pytest.mark.timing
def test_the_exit_code_of_a_manager_that_was_killed(tmp_path):
    manager = TPUManager(Told(tmp_path), Count(), nprocs=1, start=True)
    first = manager.pid
    os.kill(first, signal.SIGKILL)
    manager.join(timeout=240)
    assert not manager.is_alive() and manager.exitcode == -signal.SIGKILL
    with pytest.raises(accelmgr.ManagerLost):
        _, _ = manager.step()
    assert manager.exitcode == -signal.SIGKILL
    manager.recover()
    assert manager.is_alive() and manager.exitcode is None and manager.pid != first
    assert manager.step().ok
    manager.stop()
    assert manager.exitcode == 0


def test_a_manager_that_is_dropped_ends(tmp_path):
    manager = TPUManager(Told(tmp_path), Count(), nprocs=1, start=True)
    pid = manager.pid
    del manager
    assert not os.path.exists(f"/proc/{pid}")


ORIGINAL = """\
import torch
from accelmgr import TPUManager

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)
    def tie_weights(self):
        pass
    def forward(self, input_ids, labels):
        return dict(loss=torch.nn.functional.mse_loss(self.linear(input_ids), labels))

class Minibatches(torch.utils.data.IterableDataset):
    def __iter__(self):
        while True:
            x = torch.randn(3)
            yield dict(input_ids=x, labels=x.flip(0))

def collate(elements):
    return {name: torch.stack([one[name] for one in elements]) for name in elements[0]}

torch.manual_seed(0)
model = Net()
own = [p.detach().clone().requires_grad_() for p in model.parameters()]
optimizer = torch.optim.Adam(own, lr=0.1)
manager = TPUManager(model, Minibatches(), collate_fn=collate, nprocs=2, prefetch=4,
                     batch_size_per_device=4, grad_accumulation_steps=2, start=True)
losses = []
for _ in range(60):
    loss, num_samples = manager.step()
    assert num_samples == 16
    losses.append(loss)
    for parameter, gradient in zip(own, manager.get_aggregated_gradients()):
        parameter.grad = gradient.clone()
    optimizer.step()
    manager.update_model_parameters(own)
    manager.zero_grad()
print(losses[0] > 0.5, losses[-1] < losses[0] / 10)
manager.terminate()
manager.join()
"""


def test_a_script_for_the_original_runs_with_another_import(tmp_path):
    """The script uses get_aggregated_gradients() and update_model_parameters(), and has its own parameters."""
    code, out, err = run_script(ORIGINAL, cwd=tmp_path)
    assert (code, out) == (0, "True True\n"), (out, err)
