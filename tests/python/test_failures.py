"""Checks failures in a training loop: step() returns, names the cause, and the step counts in full or not at all."""

import itertools
import os
import pathlib
import pickle
import re
import select
import signal
import time
import warnings

import pytest
import torch
from gate import Count, Gate, Told
from launching import kill
from programs import run

import accelmgr


def start(model, **options):
    return accelmgr.Manager(model, Count(), **{"nprocs": 2, "runners__threads": 1, **options})


def elements_of(model, samples):
    """The sum of the numbers of a step's elements: the gradient is the mean over `samples` of [i, 1] / 2."""
    assert model.weight.grad[1].item() == pytest.approx(0.5)
    return model.weight.grad[0].item() * 2 * samples


def test_an_exception_in_forward_arrives_with_rank_step_and_traceback(tmp_path):
    model = Told(tmp_path)
    with start(model, runners__on_loss="fail") as manager:
        assert manager.step().ok
        before = model.weight.grad.clone()
        model.tell("raise")
        result = manager.step()
        assert (result.status, result.error_type, result.counted) == ("runner_lost", "ModelError", False)
        assert torch.equal(model.weight.grad, before)
        with pytest.raises(accelmgr.ModelError) as caught:
            _, _ = result
        error = caught.value
        assert error.rank in (0, 1) and error.step == 2 and error.status == "runner_lost"
        assert type(error.__cause__) is ArithmeticError and str(error.__cause__) == "told to raise"
        for part in (f"runner {error.rank} ", "step 2", "phase forward", "ArithmeticError: told to raise", "gate.py"):
            assert part in str(error), str(error)
        assert "in _give_up" in str(error) and "in forward" in str(error)
        assert result.causes[0].rank == error.rank and result.causes[0].step == 2
        assert manager.step().status == "runner_lost", "and every later step says so"


@pytest.mark.parametrize("policy", ["restart", "fail"])
def test_a_model_that_fails_prints_its_traceback_once(tmp_path, capfd, policy):
    """The error of the step has it. The manager does not print it again, since no replacement could help."""
    with start(Raises(tmp_path, ArithmeticError("bad model")), runners__on_loss=policy) as manager:
        result = manager.step()
        assert (result.status, result.error_type) == ("runner_lost", "ModelError")
        assert result.error.count("Traceback") == 1
    assert "Traceback" not in capfd.readouterr().err


class Slow:
    """A map-style dataset. Reading element 4 blocks while the gate is shut."""

    def __init__(self, gate):
        self._gate = gate

    def __len__(self):
        return 64

    def __getitem__(self, i):
        if i == 4:
            self._gate.pass_through()
        return torch.tensor([float(i), 1.0])


def test_an_element_that_does_not_come_is_warned_of_once_and_told_by_the_step(tmp_path, capfd):
    model = Told(tmp_path)
    slow = Gate(tmp_path / "element")
    slow.shut()
    with accelmgr.Manager(model, Slow(slow), nprocs=1, batch_size_per_device=4, runners__threads=1) as manager:
        assert manager.step().ok
        said, until = "", time.monotonic() + 240
        while "has not returned" not in said and time.monotonic() < until:
            result = manager.step(timeout=7)  # Longer than the 5 s after which the manager warns.
            assert (result.status, result.counted) == ("timeout", False)
            said += capfd.readouterr().err
        for part in ("rank 0 in phase data for ", "the data source 'python' has given 4 elements so far"):
            assert part in result.error, result.error
        assert result.step_ms >= 7000
        with pytest.raises(accelmgr.StepTimeout, match="no result within 7 s: .*rank 0") as caught:
            result.raise_for_status()
        assert isinstance(caught.value, TimeoutError)
        warning = r"'python' has not returned from dataset\[4\] for \d+ s \(element 4\).*waiting for it: rank 0"
        assert len(re.findall(warning, said)) == 1, said
        with slow.held():
            pass
        assert manager.step().ok
        assert "has not returned" not in capfd.readouterr().err


class Mute(accelmgr.ModelError):
    def __str__(self):
        raise LookupError("no text")


class Raises(Told):
    def __init__(self, folder, error):
        super().__init__(folder)
        self._error = error

    def forward(self, x):
        raise self._error


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("cannot read \udcff.jpg"), r"ValueError: cannot read \udcff.jpg"),
        (accelmgr.ModelError("cannot read \udcff.jpg"), r"cannot read \udcff.jpg"),
        (Mute(), "Mute, whose message cannot be read"),
    ],
    ids=["undecodable", "own", "none"],
)
def test_an_exception_in_forward_whose_text_is_no_text_is_the_cause(tmp_path, error, text):
    with start(Raises(tmp_path, error), nprocs=1, runners__on_loss="fail") as manager:
        result = manager.step()
        assert (result.status, result.error_type) == ("runner_lost", "ModelError")
        assert text in result.error, result.error


def test_a_number_that_is_not_finite(tmp_path):
    model = Told(tmp_path)
    with start(model) as manager:
        model.tell("nan")
        result = manager.step(accumulate=False)
        assert (result.status, result.counted) == ("nonfinite", False)
        assert model.weight.grad is None
        with pytest.raises(accelmgr.Nonfinite, match=r"rank \d"):
            result.raise_for_status()
        assert manager.step(accumulate=False).ok
        assert elements_of(model, 2) == 0 + 1, "the same elements came again"


@pytest.mark.parametrize("policy", ["restart", "fail"])
def test_a_runner_that_is_killed(tmp_path, policy):
    model = Told(tmp_path)
    with start(model, runners__on_loss=policy, runners__restart_backoff=0.01) as manager:
        assert manager.step(accumulate=False).ok
        model.tell("die")
        result = manager.step(accumulate=False)
        if policy == "fail":
            assert (result.status, result.counted, result.samples) == ("runner_lost", False, 0)
            assert elements_of(model, 2) == 0 + 1, "nothing was added"
            with pytest.raises(accelmgr.RunnerLost, match=r"killed by signal 9 \(KILL\) in phase forward"):
                result.raise_for_status()
            assert result.causes[0].exit == "killed by signal 9 (KILL)"
            return
        assert result.ok and result.tries == 2
        assert (result.participants, result.samples) == (2, 2)
        assert elements_of(model, 2) == 2 + 3, "exactly once, in order"
        assert len(manager.statistics().runners) == 2 and manager.statistics().replacements == 1
        assert manager.step(accumulate=False).ok
        assert elements_of(model, 2) == 4 + 5


def test_the_manager_is_killed_and_recovered(tmp_path):
    model = Told(tmp_path)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    with start(model) as manager:
        assert manager.step().ok
        optimizer.step()
        address = model.weight.data_ptr(), model.weight.grad.data_ptr()
        before = model.weight.detach().clone(), model.weight.grad.clone()
        pid = manager.statistics().manager_pid
        with pytest.raises(accelmgr.UsageError, match="recover"):
            manager.recover()
        kill(pid)
        result = manager.step()
        assert result.status == "manager_lost"
        with pytest.raises(accelmgr.ManagerLost, match=r"killed by signal 9 \(KILL\)"):
            result.raise_for_status()
        assert torch.equal(model.weight, before[0]) and torch.equal(model.weight.grad, before[1])
        assert repr(manager) == "<accelmgr.Manager lost: its manager process is gone, step 1>"
        manager.recover()
        assert repr(manager) == "<accelmgr.Manager running: 2 runners, step 1>"
        assert manager.statistics().manager_pid != pid
        assert (model.weight.data_ptr(), model.weight.grad.data_ptr()) == address
        result = manager.step(accumulate=False)
        assert result.ok and result.step == 2
        assert elements_of(model, 2) == 2 + 3, "a dataset that cannot be restored is read again up to where it was"


def test_a_manager_is_recovered_at_once_after_it_was_killed(tmp_path):
    """Neither waiting for its end nor a failed step must come before recover()."""
    with start(Told(tmp_path)) as manager:
        pid = manager.statistics().manager_pid
        os.kill(pid, signal.SIGKILL)
        manager.recover()
        assert manager.statistics().manager_pid != pid and manager.step().ok


def test_after_stop_every_call_says_so_and_tensors_stay(tmp_path):
    model = Told(tmp_path)
    manager = start(model)
    assert manager.step().ok
    manager.stop()
    manager.stop()
    assert elements_of(model, 2) == 0 + 1
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    for call in (manager.step, manager.recover, lambda: manager.resize(1), manager.save_checkpoint):
        with pytest.raises(accelmgr.UsageError, match=r"after stop\(\)"):
            call()
    with pytest.raises(accelmgr.UsageError, match="already started"):
        manager.start()
    with start(model, nprocs=1) as again:  # Another manager may have its model.
        assert again.step().ok


ERRORS = [
    accelmgr.Error("e"),
    accelmgr.UsageError("u"),
    accelmgr.ConfigError("c", "nprocs"),
    accelmgr.ModelError("m"),
    accelmgr.DataError("d"),
    accelmgr.SessionError("s"),
    accelmgr.CheckpointError("c"),
    accelmgr.SystemError("s", 2),
    accelmgr.RunnerError("r", 3, "forward"),
    accelmgr.CollectiveError("c", "timeout", [1, 2]),
    accelmgr.SpawnError("s", 1, 17, 0, "trace", "ValueError", "function", ["rank 2"]),
    accelmgr.DataEnd("d", 4, 1),
    accelmgr.RunnerLost("r", 4, 1),
    accelmgr.Nonfinite("n", 4, 1),
    accelmgr.StepTimeout("t", 4, -1),
    accelmgr.ManagerLost("m", 4),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_exceptions_pickle(error):
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error) and str(copy) == str(error) and vars(copy) == vars(error)


def test_every_exception_of_the_package_is_among_those_that_pickle():
    public = {getattr(accelmgr, name) for name in accelmgr.__all__}
    errors = {one for one in public if isinstance(one, type) and issubclass(one, Exception)}
    assert errors - {type(error) for error in ERRORS} == {accelmgr.StepError}


def test_warnings_are_no_noise(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with start(Told(tmp_path), nprocs=1) as manager:
            assert manager.step().ok


class Stuck(torch.utils.data.IterableDataset):
    """After two elements a worker blocks in here, so that it does not notice the end of its parent."""

    def __iter__(self):
        yield from itertools.islice(Count(), 2)
        signal.pause()


def children_of(pid):
    """Of a manager process: its fork server, and pidfds of the others."""
    server, workers = 0, []
    for task in pathlib.Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            if pathlib.Path(f"/proc/{child}/comm").read_text().strip() == "accelmgr:fork":
                server = child
            else:
                workers.append(os.pidfd_open(child))
    return server, workers


@pytest.mark.parametrize(
    ("how", "method"),
    [
        ("killed", "auto"),
        ("stopped", "auto"),
        ("killed with its fork server", "fork"),
        ("killed with its fork server", "forkserver"),
    ],
)
def test_workers_of_a_data_loader_end_with_their_manager_process(tmp_path, how, method):
    loader = torch.utils.data.DataLoader(Stuck(), batch_size=None, num_workers=1)
    with accelmgr.Manager(Told(tmp_path), loader, nprocs=1, runners__threads=1, start_method=method) as manager:
        assert manager.step().ok
        pid = manager.statistics().manager_pid
        server, workers = children_of(pid)
        assert server and workers
        if how == "killed with its fork server":
            os.kill(server, signal.SIGSTOP)  # Otherwise it might see that the manager has ended, and clean up.
        if how != "stopped":
            os.kill(pid, signal.SIGKILL)
        if how == "killed with its fork server":
            os.kill(server, signal.SIGKILL)
        if how != "killed":
            manager.stop()
        for worker in workers:
            assert select.select([worker], [], [], 30)[0], "a worker is left"
            os.close(worker)


RUNS_OUT_OF_MEMORY = """\
import pathlib, sys, torch, accelmgr
from gate import Count, Told
group, limit, usage, folder = map(pathlib.Path, sys.argv[1:])

class Hungry(Told):
    def forward(self, x):
        if self._told("eat"):
            eaten = torch.ones(1 << 30)
        return super().forward(x)

(group / "cgroup.procs").write_text("0")
model = Hungry(folder)
with accelmgr.Manager(model, Count(), nprocs=2, start_method="spawn", runners__threads=1) as manager:
    manager.step().raise_for_status()
    limit.write_text(str(int(usage.read_text()) + (1 << 30)))
    model.tell("eat")
    print(manager.step().tries)
"""


@pytest.fixture
def memory_group():
    """A memory control group of one's own, with the files of its limit and its usage."""
    for parent, limit, usage in (
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
        ("/sys/fs/cgroup", "memory.max", "memory.current"),
    ):
        group = pathlib.Path(parent) / f"accelmgr-test-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        has_limit = (group / limit).exists()
        if has_limit:
            yield group, group / limit, group / usage
        group.rmdir()
        if has_limit:
            return
    pytest.skip(
        "this user may make no control group with a memory limit, so the kernel cannot be made to kill a runner"
    )


def test_a_runner_that_the_kernel_kills_for_want_of_memory_is_told_as_such(tmp_path, memory_group):
    code, out, err = run("-c", RUNS_OUT_OF_MEMORY, *map(str, memory_group), str(tmp_path), cwd=tmp_path)
    assert (code, out) == (0, "2\n"), err
    assert "killed by signal 9 (KILL) in phase forward: the kernel has killed it for want of memory" in err
