"""Elements of any kind and length: batches as of torch's default_collate; read, seeded and resumed."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import enum
import gc
import json
import os
import pathlib
import pickle
import random
import sqlite3
import threading
import weakref
from typing import Any

import numpy
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from saving import save
from torch.utils.data import default_collate

import accelmgr
from accelmgr._data import long_elements
from accelmgr._data.elements import PICKLED, Elements, collated, mapped, restore_structure
from accelmgr._data.feed import Feed
from accelmgr._data.long_elements import LongElements, element_in
from accelmgr._data.reading import Reading
from accelmgr._serialization.pickling import dump_dataset, load_dataset

Pair = collections.namedtuple("Pair", "x y")
OPTIONS = {"as_bytes": False, "max_element_bytes": 0}


class Colour(enum.Enum):
    RED = 1


@dataclasses.dataclass
class Row:
    x: torch.Tensor
    note: Any


def rows_of(elements: Elements) -> list[list[Any]]:
    found = []
    while (row := elements.next()) is not None or elements.more_epochs:
        found += [row] if row is not None else []
    return found


def batch_of(elements: Elements, rows: list[list[Any]]) -> Any:
    """What a runner makes of the rows."""
    if elements.fields[0][0] == PICKLED:
        return collated(default_collate, [pickle.loads(element_in(memoryview(row[0]))) for row in rows])
    fields = zip(elements.fields, zip(*rows, strict=True), strict=True)
    return restore_structure([(name, torch.stack(values)) for (name, *_), values in fields])


LEAVES = st.one_of(
    st.integers(-100, 100),
    st.floats(allow_nan=False, width=32),
    st.booleans(),
    st.text(max_size=5),
    st.binary(max_size=5),
    st.sampled_from([numpy.float64(1.5), numpy.int32(3), numpy.bool_(True), numpy.str_("word")]),
    st.integers(1, 4).map(torch.arange),
    st.integers(1, 4).map(lambda n: numpy.ones((n, 2), dtype=numpy.float32)),
)
STRUCTURES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3),
        st.lists(inner, min_size=1, max_size=3).map(tuple),
        st.dictionaries(st.sampled_from("abc"), inner, min_size=1, max_size=3),
        st.tuples(inner, inner).map(lambda pair: Pair(*pair)),
    ),
    max_leaves=6,
)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return isinstance(other, dict) and list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):  # A list of the stacked path comes as a tuple: positional arguments both.
        return isinstance(other, (list, tuple)) and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


def arguments(batch: Any) -> Any:
    """What the model is called with: keyword arguments, or positional ones."""
    return batch if isinstance(batch, dict) else list(batch) if isinstance(batch, (list, tuple)) else [batch]


def expected_arguments(elements: list[Any]) -> Any:
    """A batch of mappings has keyword arguments, one of tuples or lists positional ones; any other is one argument."""
    batch = default_collate(elements)
    return arguments(batch if isinstance(elements[0], (dict, list, tuple)) else [batch])


def another(element: Any, draw: Any) -> Any:
    """An element of the same structure, with other numbers and texts, and keys in another order."""
    if isinstance(element, dict):
        return {key: another(element[key], draw) for key in draw(st.permutations(list(element)))}
    if isinstance(element, (list, tuple)):
        parts = [another(part, draw) for part in element]
        return Pair(*parts) if isinstance(element, Pair) else type(element)(parts)
    if type(element) is str:
        return draw(st.text(max_size=5))
    if type(element) in (int, float):
        return element + 1
    return element


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(first=STRUCTURES, data=st.data())
def test_a_batch_is_that_of_default_collate(first, data):
    rows = [first, *(another(first, data.draw) for _ in range(data.draw(st.integers(0, 2))))]
    elements = Elements(rows, dict(OPTIONS))
    assert same(arguments(batch_of(elements, rows_of(elements))), expected_arguments(rows))


@pytest.mark.parametrize("element", [None, Row(torch.ones(2), "a"), {"x": 1, "y": None}, [datetime.date(2026, 1, 2)]])
def test_elements_that_default_collate_refuses_are_refused_at_the_start(element):
    with pytest.raises(TypeError):
        default_collate([element])
    with pytest.raises(accelmgr.DataError, match=f"the first is a {type(element).__name__}: .*pass a collate_fn"):
        Elements([element], dict(OPTIONS))


class Names(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def forward(self, batch: list[Any]) -> torch.Tensor:
        return self.weight.sum() * sum(len(each) for each in batch)


@pytest.mark.parametrize("collate_fn", [None, list])
def test_a_list_of_texts_or_of_samples_is_one_argument_of_the_model(collate_fn):
    rows = [{"x": i} if collate_fn else "a" * i for i in range(1, 5)]
    with accelmgr.Manager(Names(), rows, collate_fn=collate_fn, nprocs=1, batch_size_per_device=2) as manager:
        assert [result.loss for result in manager.steps()] == ([2, 2] if collate_fn else [3, 7])


@pytest.mark.parametrize(
    "note",
    [None, datetime.date(2026, 1, 2), Colour.RED, pathlib.Path("a"), {"deep": [1, {"er": (None,)}]}, b"x", {1, 2}],
)
def test_anything_travels_to_a_collate_fn(note):
    elements = Elements([Row(torch.ones(2), note)] * 2, {"as_bytes": True, "max_element_bytes": 0})
    found = [pickle.loads(element_in(memoryview(row[0]))) for row in rows_of(elements)]
    assert [row.note for row in found] == [note, note]


def test_long_elements_lie_elsewhere_until_they_are_consumed():
    long = LongElements()
    elements = Elements(
        [torch.ones(10), *(torch.full((30_000 + i,), float(i)) for i in range(4))],
        {
            "as_bytes": True,
            "max_element_bytes": 0,
            "long": long.address,
        },
    )
    for number in range(5):
        (row,) = elements.next(max(0, number - 1))
        value = pickle.loads(element_in(memoryview(row.ljust(64))))
        assert value.numel() == (30_000 + number - 1 if number else 10)
    used = os.stat(long._fd).st_blocks * 512
    long.free(5)
    assert os.stat(long._fd).st_blocks * 512 < 3 * 4096 < used
    long.close()
    long_elements._file_of.cache_clear()


def test_tensors_and_arrays_of_a_dataset_are_not_pickled(tmp_path):
    base = torch.arange(100_000)
    array = numpy.ones(50_000)
    numpy.arange(30_000, dtype=numpy.int64).tofile(tmp_path / "numbers")
    mapped = numpy.memmap(tmp_path / "numbers", dtype=numpy.int64, mode="r")[10_000:]
    data, buffers = dump_dataset({"all": base, "views": [base[i::2] for i in range(2)], "array": array, "file": mapped})
    assert len(data) < 10_000
    assert sum(buffer.nbytes for buffer in buffers) == base.nbytes + array.nbytes
    found = load_dataset(data, [memoryview(bytearray(buffer)) for buffer in buffers])
    assert torch.equal(found["all"], base) and torch.equal(found["views"][1], base[1::2])
    assert found["views"][0].untyped_storage().data_ptr() == found["all"].untyped_storage().data_ptr()
    assert (found["array"] == array).all() and (found["file"] == mapped).all() and type(found["file"]) is numpy.memmap


class Augmented:
    """dataset[i] draws from all three generators."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, random.random(), numpy.random.rand(), torch.rand(1).item()], dtype=torch.float64)


class Shuffled:
    def __iter__(self):
        order = list(range(10))
        random.shuffle(order)
        for number in order:
            yield torch.tensor([float(number), torch.rand(1).item()], dtype=torch.float64)


class Stateful:
    def __init__(self) -> None:
        self.at = 0

    def __iter__(self):
        while self.at < 10:
            self.at += 1
            yield torch.tensor([float(self.at)])

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "bytes": b"\0\xff", "tensor": torch.arange(3)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["bytes"] == b"\0\xff" and state["tensor"].tolist() == [0, 1, 2]
        self.at = state["at"]


KINDS = [
    Augmented,
    Shuffled,
    Stateful,
    lambda: torch.utils.data.DataLoader(Augmented(), batch_size=None, shuffle=True),
    lambda: torch.utils.data.DataLoader(Augmented(), batch_size=None, shuffle=True, num_workers=2),
]


def seed(number: int) -> None:
    random.seed(number)
    numpy.random.seed(number)
    torch.manual_seed(number)


@pytest.mark.parametrize("position", [0, 1, 7, 10])
@pytest.mark.parametrize(
    ("kind", "epochs"), [(kind, epochs) for kind in KINDS for epochs in (1, 2) if (kind, epochs) != (Stateful, 2)]
)
def test_another_process_goes_on_with_the_same_elements(kind, position, epochs):
    seed(1)
    elements = Elements(kind(), {**OPTIONS, "epochs": epochs})
    rows = [elements.next()[0].clone() for _ in range(position)]
    state = elements.state()
    rest = [row[0].clone() for row in rows_of(elements)]
    assert len(rows) + len(rest) == 10 * epochs
    seed(2)
    other = Elements(kind(), {**OPTIONS, "epochs": epochs})
    other.restore(state)
    assert [row[0].tolist() for row in rows_of(other)] == [row.tolist() for row in rest]


class Unrepeatable:
    def __iter__(self):
        yield from (torch.tensor([int.from_bytes(os.urandom(4), "little")]) for _ in range(10))


def test_a_source_whose_order_cannot_be_repeated_is_refused():
    elements = Elements(Unrepeatable(), dict(OPTIONS))
    for _ in range(3):
        elements.next()
    other = Elements(Unrepeatable(), dict(OPTIONS))
    other.restore(elements.state())
    with pytest.raises(accelmgr.DataError, match=r"gave other elements than the first time.*state_dict\(\)"):
        other.next()


class Noisy(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.LazyLinear(4), torch.nn.Dropout(), torch.nn.Linear(4, 1)).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x.double()).square().mean()


def locked(count: int = 10):
    """A generator that only the host can read."""
    lock = threading.Lock()
    for number in range(count):
        with lock:
            yield torch.tensor([float(number), number / 3], dtype=torch.float64)


@pytest.mark.parametrize("kind", [*KINDS, locked])
def test_a_run_that_resumes_trains_as_one_that_was_not_interrupted(kind, tmp_path):
    """Model, Adam, a schedule, dropout, order and augmentation go on."""

    def train(steps: int, stop_at: int = 0, **checkpoint: str) -> list[float]:
        seed(1)
        model = Noisy()
        model(torch.zeros(1, len(next(iter(rows_of(Elements(kind(), dict(OPTIONS)))))[0])))
        seed(1)
        options = {"nprocs": 1, "runners__threads": 1, "batch_size_per_device": 2}
        with accelmgr.Manager(model, kind(), checkpoint=checkpoint, **options) as manager:
            optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
            schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
            if "resume" in checkpoint:
                manager.restore(optimizer, schedule)
            losses = []
            for result in manager.steps(steps):
                losses.append(result.loss)
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
                if len(losses) == stop_at:
                    save(manager, optimizer=optimizer, scheduler=schedule)
        return losses

    whole = train(5, stop_at=2, directory=str(tmp_path))
    assert train(3, directory=str(tmp_path), resume="latest") == whole[2:]


def shuffled_anew():
    lock = threading.Lock()
    for element in Unrepeatable():
        with lock:
            yield element


@pytest.mark.parametrize("consumed", [0, 3, 10])
@pytest.mark.parametrize("kind", [locked, shuffled_anew])
def test_the_same_for_a_source_that_the_host_reads(kind, consumed):
    first, second = Feed(kind()), Feed(kind())
    elements = Elements(first.address, dict(OPTIONS))
    for _ in range(consumed):
        elements.next()
    other = Elements(second.address, dict(OPTIONS))
    other.restore(elements.state())
    if kind is locked or consumed == 0:
        assert len(rows_of(other)) == 10 - consumed
    else:
        with pytest.raises(accelmgr.DataError, match="gave other elements than the first time"):
            other.next()
    del elements, other
    first.close()
    second.close()


def test_an_indexed_source_that_the_host_reads_goes_on_at_its_index():
    read = []

    class Indexed:
        def __len__(self) -> int:
            return 10

        def __getitem__(self, index: int) -> torch.Tensor:
            read.append(index)
            return torch.tensor([index, random.random()])

    feed = Feed(Indexed(), epochs=2)
    other = Elements(feed.address, dict(OPTIONS))
    other.restore(json.dumps({"elements": 17, "checksum": 0}))
    assert [row[0][0].item() for row in rows_of(other)] == [7, 8, 9]
    assert read == [0, 7, 8, 9]
    del other
    feed.close()


def test_a_position_that_was_restored_is_the_position_before_the_next_element():
    def generated():
        yield from range(9)

    for make in (generated, lambda: collections.deque(range(9))):  # The former cannot begin again.
        read = Reading(make())
        for _ in range(5):
            read.next()
        for _ in range(2):
            position = read.position()
            read = Reading(make())
            read.restore(json.loads(position))
            assert read.position() == position
        assert read.next() == [5]


def test_positions_of_other_kinds_are_refused():
    for state in ("", "x", "[]", "{}", "12"):
        with pytest.raises(accelmgr.DataError, match="cannot be resumed"):
            Elements(Shuffled(), dict(OPTIONS)).restore(state)
    assert Reading(Augmented()).position()


class Seen(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.weight * x).sum(), "x": x.double().mean()}


class Tables:
    """A connection may be used by the thread that has opened it alone."""

    def __init__(self, path: pathlib.Path) -> None:
        self.base = sqlite3.connect(path)

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(self.base.execute("select x from rows where i = ?", (index,)).fetchone())


@pytest.fixture
def base(tmp_path):
    connection = sqlite3.connect(tmp_path / "rows.db")
    connection.execute("create table rows (i integer primary key, x real)")
    connection.executemany("insert into rows values (?, ?)", [(i, float(i)) for i in range(8)])
    connection.commit()
    yield tmp_path / "rows.db"
    connection.close()


def test_a_dataset_that_is_bound_to_its_thread_is_read_there(base):
    tables = Tables(base)
    cursor = tables.base.execute("select x from rows order by i")
    for dataset in (tables, (torch.tensor([x]) for (x,) in cursor)):
        with accelmgr.Manager(Seen(), dataset, nprocs=1, batch_size_per_device=1, runners__threads=1) as manager:
            assert [result.scalars["x"] for result in manager.steps()] == [float(i) for i in range(8)]


def collate(rows: list[Row]) -> dict[str, torch.Tensor]:
    return {"x": torch.stack([row.x for row in rows]).sum(1)}


def test_classes_of_a_test_and_lengths_of_all_sizes_reach_a_runner():
    @dataclasses.dataclass
    class Local(Row):
        pass

    data = [Local(torch.ones(size), "a") for size in (3, 3, 50_000, 3, 400_000, 3)]
    with accelmgr.Manager(Seen(), data, collate_fn=collate, nprocs=1, batch_size_per_device=1) as manager:
        assert [result.scalars["x"] for result in manager.steps()] == [3, 3, 50_000, 3, 400_000, 3]


def test_the_sizes_of_a_packed_sequence_stay_on_the_cpu_as_torch_wants_them():
    sequences = [torch.randn(3, 2), torch.randn(5, 2)]
    packed = torch.nn.utils.rnn.pack_sequence(sequences, enforce_sorted=False)
    moved = mapped(lambda tensor: tensor.to("meta"), {"batch": [packed]})["batch"][0]
    assert (moved.data.device.type, moved.batch_sizes.device.type) == ("meta", "cpu")
    assert moved.sorted_indices.device.type == moved.unsorted_indices.device.type == "meta"


def test_what_was_pickled_of_a_dataset_is_freed_without_the_garbage_collector():
    """A cycle that holds it would keep it until garbage is collected, and CPython 3.12 crashed there."""
    gc.collect()
    gc.disable()
    try:
        dataset = [torch.arange(10000), "text"]
        alive = weakref.ref(dataset[0])
        data, buffers = dump_dataset(dataset)
        assert len(data) < 10000 < sum(buffer.nbytes for buffer in buffers)
        del dataset, data, buffers
        assert alive() is None
    finally:
        gc.enable()
