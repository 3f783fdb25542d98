"""What a script changes between steps reaches its runners: by values, or because they are forked anew."""

from __future__ import annotations

import array
import collections
import contextvars
import io
import logging
import operator
import pathlib
import textwrap
from collections.abc import Iterator

import numpy
import pytest
import torch
from conftest import RECORD, descriptors
from launching import kill
from programs import run_script
from torch import nn

import accelmgr
from accelmgr._host import watch
from accelmgr._memory.files import are_of_files

ONE = {"nprocs": 1, "batch_size_per_device": 1}

VARIABLE: contextvars.ContextVar[float] = contextvars.ContextVar("VARIABLE")


class Scale:
    """A hook that is an object."""

    def __init__(self) -> None:
        self.by, self.history, self.names = 1.0, [1.0], {"one"}
        self.queue, self.parts = collections.deque([1.0]), {"a": {"b": 1.0}}
        self.bytes, self.array, self.variable = bytearray([1]), array.array("d", [1.0]), VARIABLE

    def __call__(self, module: nn.Module, inputs: object, output: torch.Tensor) -> torch.Tensor:
        factor = self.by * self.history[-1] * len(self.names) * self.queue[-1] * self.parts["a"]["b"]
        factor *= self.bytes[0] * self.array[0] * self.variable.get(1.0)
        return output * factor * getattr(self, "new", 1.0)


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.inner = nn.Identity()
        self.factor, self.shift = 1.0, torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = getattr(self.weight, "mask", 1.0)
        return self.inner(self.weight * x * mask).mean() * self.factor + self.shift


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    def __init__(self, count: int = 64) -> None:
        self.count, self.epoch = count, 0

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(float(index + 1 + 1000 * self.epoch))


def pids(manager: accelmgr.Manager) -> list[int]:
    return [runner.pid for runner in manager.statistics().runners]


def test_values_of_modules_are_told_and_nothing_begins_anew() -> None:
    model = Line()
    with accelmgr.Manager(model, Rows(), **ONE) as manager:
        before = pids(manager)
        assert manager.step().loss == 1
        model.factor = 3.0
        model.shift.fill_(0.5)
        assert manager.step().loss == 2 * 3 + 0.5
        model.shift = torch.tensor(2.0)
        model.eval()
        assert manager.step().loss == 3 * 3 + 2
        for number in range(4, 24):
            model.factor = float(number)
            assert manager.step().loss == number * number + 2
        assert pids(manager) == before
        assert sum(RECORD in link for link in descriptors().values()) <= 2, "they do not become more"
        kill(before[0])
        assert manager.step().loss == 24 * 23 + 2, "a replacement is told all of them"


CHANGES = {
    "attribute of a hook": lambda model, hook: setattr(hook, "by", 2.0),
    "list of a hook": lambda model, hook: hook.history.append(2.0),
    "set of a hook": lambda model, hook: hook.names.add("two"),
    "deque of a hook": lambda model, hook: hook.queue.append(2.0),
    "dict in a dict of a hook": lambda model, hook: hook.parts["a"].update(b=2.0),
    "bytes of a hook": lambda model, hook: operator.setitem(hook.bytes, 0, 2),
    "array of a hook": lambda model, hook: operator.setitem(hook.array, 0, 2.0),
    "context variable": lambda model, hook: VARIABLE.set(2.0),
    "new attribute of a hook": lambda model, hook: setattr(hook, "new", 2.0),
    "attribute of a parameter": lambda model, hook: setattr(model.weight, "mask", 2.0),
    "another hook": lambda model, hook: model.inner.register_forward_hook(lambda module, inputs, output: output * 2),
    "another module": lambda model, hook: setattr(model, "inner", Doubles()),
    "a function of a module": lambda model, hook: setattr(model.inner, "forward", lambda x: x * 2),
}


class Doubles(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


@pytest.mark.parametrize("change", CHANGES)
def test_what_values_do_not_say_is_followed_by_forking_anew(change: str) -> None:
    """With the elements in order, each once."""
    model, hook = Line(), Scale()
    model.inner.register_forward_hook(hook)

    def check() -> None:
        with accelmgr.Manager(model, Rows(), **ONE) as manager:
            before = pids(manager)
            assert manager.step().loss == 1
            hook.by = float("1")  # An equal number is no change.
            assert manager.step().loss == 2 and pids(manager) == before
            CHANGES[change](model, hook)
            assert [manager.step().loss for _ in range(2)] == [6, 8]
            assert pids(manager) != before
            assert manager.statistics().elements == 4

    contextvars.copy_context().run(check)


def test_a_progress_bar_of_the_model_is_no_change() -> None:
    tqdm = pytest.importorskip("tqdm")
    model = Line()
    model.bar = tqdm.tqdm(total=3, file=io.StringIO())
    with accelmgr.Manager(model, Rows(), **ONE) as manager:
        before = pids(manager)
        for _ in range(3):
            assert manager.step().ok
            model.bar.update()
        assert pids(manager) == before
    model.bar.close()


def test_with_another_start_method_such_a_change_is_named_and_refresh_helps() -> None:
    model = Line()
    with accelmgr.Manager(model, Rows(), start_method="forkserver", **ONE) as manager:
        assert manager.step().loss == 1
        model.inner = nn.Hardtanh(0.0, 1.5)
        with pytest.raises(
            accelmgr.ModelError, match=r"a module of model\. Processes of the start method 'forkserver'"
        ):
            manager.step()
        manager.refresh()
        assert manager.step().loss == 1.5
        assert manager.statistics().elements == 2


@pytest.mark.parametrize("prefetch", [0, 8])
def test_a_dataset_that_was_changed_is_read_anew_also_where_it_was_read_ahead(prefetch: int) -> None:
    dataset = Rows()
    with accelmgr.Manager(Line(), dataset, prefetch=prefetch, **ONE) as manager:
        assert manager.step().loss == 1
        dataset.epoch = 1
        assert [manager.step().loss for _ in range(3)] == [1002, 1003, 1004]
        dataset.epoch = 0
        assert [manager.step().loss for _ in range(2)] == [5, 6]


class Held(torch.utils.data.Dataset[torch.Tensor]):
    """Multiplies what it holds, in several forms."""

    def __init__(self, rows: int) -> None:
        self.tensor, self.array = torch.ones(rows), numpy.ones(rows)
        self.list, self.dict = [1.0] * rows, dict.fromkeys(range(rows), 1.0)
        self.deque = collections.deque(self.list, rows)
        self.dates = numpy.array(["2020-01-01"] * rows, dtype="datetime64[D]")

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        day = 1.0 + float(self.dates[index] != numpy.datetime64("2020-01-01"))
        return self.tensor[index] * self.array[index] * self.list[index] * self.dict[index] * self.deque[-1] * day


TRACELESS = {
    "tensor": lambda held: held.tensor.data.fill_(2.0),
    "tensor, as array": lambda held: held.tensor.numpy().fill(2.0),
    "tensor, other memory": lambda held: setattr(held.tensor, "data", 2 * held.tensor),
    "array": lambda held: held.array.fill(2.0),
    "dates": lambda held: held.dates.__iadd__(1),
    "list": lambda held: operator.setitem(held.list, 2, 2.0),
    "dict": lambda held: operator.setitem(held.dict, 2, 2.0),
    "deque": lambda held: held.deque.append(2.0),
}


@pytest.mark.parametrize("rows", [64, 50_000])
@pytest.mark.parametrize("change", TRACELESS)
def test_writes_that_leave_no_trace_are_found_by_content(change: str, rows: int) -> None:
    held = Held(rows)
    with accelmgr.Manager(Line(), held, **ONE) as manager:
        before = pids(manager)
        assert manager.step().loss == 1 and manager.step().loss == 1
        assert pids(manager) == before
        TRACELESS[change](held)
        assert manager.step().loss == 2


def test_of_large_tensors_a_sample_is_compared() -> None:
    held = Held(64)
    held.more = [torch.zeros(1 << 20) for _ in range(3)]
    with accelmgr.Manager(Line(), held, **ONE) as manager:
        for tensor in held.more:
            before = pids(manager)
            assert manager.step().ok and pids(manager) == before
            tensor.data.fill_(1.0)
            assert manager.step().ok and pids(manager) != before


def test_a_tensor_that_changes_again_is_told_to_the_forks_that_know_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model, target = Line(), torch.ones(3, 2).t()[1]
    model.inner.register_forward_hook(lambda module, inputs, output: output * target.sum())
    with accelmgr.Manager(model, Rows(), **ONE) as manager:
        assert manager.step().loss == 3
        target.fill_(2.0)
        assert manager.step().loss == 2 * 6
        before = pids(manager)
        for number in range(3, 8):
            target.data.fill_(number)
            assert manager.step().loss == number * 3 * number
        assert pids(manager) == before
        kill(before[0])
        assert manager.step().loss == 8 * 3 * 7, "a replacement is told, too"
        target.data = torch.ones(4)
        before = pids(manager)
        assert manager.step().loss == 9 * 4 and pids(manager) != before, "another form is not told"
        monkeypatch.setattr(watch, "MOST_TOLD_BYTES", 4)
        before = pids(manager)
        target.fill_(2.0)
        assert manager.step().loss == 10 * 8 and pids(manager) != before


def test_a_tensor_of_model_and_dataset_changes_in_both() -> None:
    model, held = Line(), Held(64)
    model.inner.register_forward_hook(lambda module, inputs, output: output * held.tensor[0])
    with accelmgr.Manager(model, held, **ONE) as manager:
        for number in range(1, 5):
            held.tensor.data.fill_(number)
            assert manager.step().loss == number * number


def test_a_write_without_a_trace_to_an_attribute_or_a_large_buffer_is_told() -> None:
    model = Line()
    model.factor = torch.ones(())
    model.register_buffer("mask", torch.ones(1 << 16))
    model.inner.register_forward_hook(lambda module, inputs, output: output * model.mask[5])
    with accelmgr.Manager(model, Rows(), **ONE) as manager:
        before = pids(manager)
        assert manager.step().loss == 1
        model.factor.data.fill_(3.0)
        assert manager.step().loss == 2 * 3
        model.mask.numpy().fill(2.0)
        assert manager.step().loss == 3 * 3 * 2
        assert pids(manager) == before


def test_memory_of_a_file_is_not_read(tmp_path: pathlib.Path) -> None:
    """Of an array that is larger than what is compared in full."""
    file = numpy.memmap(tmp_path / "rows", dtype="float32", mode="w+", shape=1 << 20)
    assert are_of_files([file.ctypes.data, torch.ones(8).data_ptr()]) == [True, False]


@pytest.mark.parametrize(("refresh", "found"), [("never", [1, 2, 3]), ("always", [1, 4, 6]), ("auto", [1, 4, 6])])
def test_it_is_the_caller_s_choice(refresh: str, found: list[int]) -> None:
    model, hook = Line(), Scale()
    model.inner.register_forward_hook(hook)
    with accelmgr.Manager(model, Rows(), refresh=refresh, **ONE) as manager:
        losses = [manager.step().loss]
        hook.by = 2.0
        losses += [manager.step().loss for _ in range(2)]
        if refresh == "never":
            manager.refresh()
            assert manager.step().loss == 8
    assert losses == found


SCRIPT = """\
import collections, torch, accelmgr
from torch import nn

weight = 1.0

def ramp():
    level = 1.0
    def set_level(value):
        nonlocal level
        level = value
    return (lambda x: x * level), set_level

scaled, set_level = ramp()

class Parts(collections.namedtuple("Parts", "loss")):
    __slots__ = ()
    kind = property(lambda self: "parts")
    @classmethod
    def of(cls, loss):
        return cls(loss)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(()))
    def forward(self, x):
        return Parts.of(scaled(self.w * x).mean() * weight)

def pid(manager):
    return manager.statistics().runners[0].pid

with accelmgr.Manager(Net(), [torch.tensor(1.0)] * 8, nprocs=1) as manager:
    before = pid(manager)
    losses = [manager.step().loss]
    losses[0] = manager.step().loss
    assert pid(manager) == before, "nothing has changed"
    weight = 3.0
    losses.append(manager.step().loss)
    set_level(5.0)
    losses.append(manager.step().loss)
    Net.forward = lambda self, x: Parts.of((self.w * x).mean() * 7)
    losses.append(manager.step().loss)
print(losses)
"""


RUN = {
    "a script": SCRIPT,
    "exec() in a namespace": f"exec({SCRIPT!r}, {{'__name__': 'cell'}})",
    "a process of multiprocessing": f"""\
import multiprocessing
if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=print)
    process.start()
    process.join()
else:
{textwrap.indent(SCRIPT, "    ")}""",
}


@pytest.mark.parametrize("way", RUN)
def test_globals_closures_and_classes_of_the_script_are_followed(tmp_path: pathlib.Path, way: str) -> None:
    _, out, err = run_script(RUN[way], cwd=tmp_path)
    assert out.strip() == "[1.0, 3.0, 15.0, 7.0]", err


PROJECT = {
    "config.py": "scale = 1.0\n",
    "parts/__init__.py": "",
    "parts/settings.py": "shift = 0.0\n",
    "losses.py": """\
import config
power = 1.0

class Weighted:
    by = 1.0
    def __call__(self, loss):
        return loss * self.by * power

def scaled(loss):
    return loss * config.scale
""",
    "model.py": """\
import torch
import losses

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w, self.weighted = torch.nn.Parameter(torch.ones(())), losses.Weighted()
    def forward(self, x):
        from parts import settings
        return self.weighted(losses.scaled(self.w * x)).mean() + settings.shift
""",
}
OF_MODULES = """\
import accelmgr, config, losses, model, parts.settings, torch

with accelmgr.Manager(model.Net(), [torch.tensor(1.0)] * 8, nprocs=1) as manager:
    found = [manager.step().loss, manager.step().loss]
    pid = manager.statistics().runners[0].pid
    assert manager.step().ok and manager.statistics().runners[0].pid == pid, "nothing has changed"
    for module, name in ((config, "scale"), (losses, "power"), (losses.Weighted, "by"), (parts.settings, "shift")):
        setattr(module, name, 2.0)
        found.append(manager.step().loss)
print(found)
"""


def test_modules_of_the_script_s_project_are_followed(tmp_path: pathlib.Path) -> None:
    for name, text in PROJECT.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    _, out, err = run_script(OF_MODULES, cwd=tmp_path)
    assert out.strip() == "[1.0, 1.0, 2.0, 4.0, 8.0, 10.0]", err


def test_what_recover_has_forked_is_what_later_changes_are_compared_with() -> None:
    model, hook = Line(), Scale()
    model.inner.register_forward_hook(hook)
    with accelmgr.Manager(model, Rows(), **ONE) as manager:
        assert manager.step().loss == 1
        hook.by = 3.0
        kill(manager.statistics().manager_pid)
        manager.recover()
        hook.by = 1.0
        assert manager.step().loss == 2


def test_what_changes_before_each_step_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    model, hook = Line(), Scale()
    model.inner.register_forward_hook(hook)
    with accelmgr.Manager(model, Rows(), **ONE) as manager, caplog.at_level(logging.WARNING, "accelmgr"):
        for number in range(25):
            hook.by = float(number)
            assert manager.step().loss == number * (number + 1)
    (text,) = [record.getMessage() for record in caplog.records]
    assert "has changed before each of the last 20 steps" in text and "refresh='never'" in text


class Played(torch.utils.data.IterableDataset[torch.Tensor]):
    """Its elements are the present parameter."""

    def __init__(self, policy: Line) -> None:
        self.policy = policy

    def __iter__(self):
        while True:
            yield self.policy.weight.detach().clone()


def played(policy: Line) -> Iterator[torch.Tensor]:
    yield from Played(policy)


@pytest.mark.parametrize("dataset", [Played, played])
def test_a_dataset_that_computes_with_the_model_has_the_parameters_of_its_step(dataset) -> None:
    """With prefetch=0 no element is read before the parameters of its step are written; a generator is read here."""
    policy = Line()
    shape = {"nprocs": 2, "batch_size_per_device": 3, "grad_accumulation_steps": 2}
    with accelmgr.Manager(policy, dataset(policy), prefetch=0, **shape) as manager:
        for number in range(1, 12):
            with torch.no_grad():
                policy.weight.fill_(float(number))
            assert manager.step().loss == number**2
