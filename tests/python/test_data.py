"""Tests of datasets: what their elements may be, how they end, and how they fail."""

import collections.abc
import random
import types

import numpy as np
import pytest
import torch
import torch.utils.data
from oracle import Oracle, assert_equal
from saving import save
from torch import nn

import accelmgr
from accelmgr._data.elements import Elements


class Line(nn.Module):
    """Takes its inputs by position or by name."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, -2.0, 0.5]))

    def forward(self, x, factor=1.0, name=None):
        assert name is None or name == ["row"] * len(x)
        loss = (x * self.weight * torch.as_tensor(factor, dtype=x.dtype).view(-1, 1)).sin().mean()
        return loss, "nothing else of a tuple counts"


def row(i):
    return torch.tensor([i, i + 0.5, i * i], dtype=torch.float32) / 8


class BatchEncoding(collections.abc.Mapping):
    """A mapping that is no dict, as tokenizers return. The default collate_fn returns one too."""

    def __init__(self, data):
        self.data = data

    def __getitem__(self, key):
        return self.data[key]

    def __iter__(self):
        return iter(self.data)

    def __len__(self):
        return len(self.data)


class MapStyle(torch.utils.data.Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, index):
        return row(index), index  # Never raises IndexError; only the length says where it ends.


def pad(rows):
    longest = max(len(one) for one in rows)
    same = [nn.functional.pad(one[:3], (0, 3 - min(len(one), 3))) for one in rows]
    return {"x": torch.stack(same), "factor": longest}


KINDS = {
    "tensors_and_an_uneven_end": ([row(i) for i in range(7)], None),
    "mappings": ([BatchEncoding({"x": row(i), "factor": torch.tensor(i)}) for i in range(6)], None),
    "arrays": ([(row(i).numpy(), row(i).numpy().mean()) for i in range(6)], None),
    "text_beside": ([{"x": row(i), "name": "row"} for i in range(6)], None),
    "ragged": ([torch.arange(1.0, 2 + i) for i in range(6)], pad),
    "map_style": (MapStyle(), None),
    "loader": (torch.utils.data.DataLoader([row(i) for i in range(12)], batch_size=2), lambda rows: rows[0]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_elements_of_every_kind_give_the_gradients_of_plain_pytorch(kind):
    dataset, collate_fn = KINDS[kind]
    batch = 1 if kind == "loader" else 2
    oracle = Oracle(
        Line(),
        [dataset[i] for i in range(6)] if kind == "map_style" else dataset,
        nprocs=1,
        batch_size_per_device=batch,
        collate_fn=collate_fn,
    )
    model = Line()
    with accelmgr.Manager(
        model, dataset, nprocs=1, batch_size_per_device=batch, collate_fn=collate_fn, runners__threads=1
    ) as manager:
        losses = [result.loss for result in manager.steps()]
        assert losses == pytest.approx([oracle.step() for _ in range(6 // batch)], rel=1e-5)
        assert_equal([model.weight.grad], oracle.gradients())
        ended = manager.step()
        assert (ended.status, ended.samples, bool(ended)) == ("data_end", 0, False)
        with pytest.raises(accelmgr.DataEnd):
            _, _ = ended


class Breaks:
    def __init__(self, at):
        self.at = at

    def __iter__(self):
        for i in range(100):
            if i == self.at:
                self.give_up(i)
            yield {"x": row(i)}

    def give_up(self, i):
        raise LookupError(f"no row {i} in the file \udcff.jpg")


@pytest.mark.parametrize("served", [False, True], ids=["pickled", "served"])
def test_a_dataset_that_raises_arrives_with_its_traceback_after_what_it_gave(served):
    """Also with a name that cannot be decoded."""
    dataset = iter(Breaks(4)) if served else Breaks(4)
    with accelmgr.Manager(Line(), dataset, nprocs=2, batch_size_per_device=1) as manager:
        assert [manager.step().status for _ in range(2)] == ["ok", "ok"]
        result = manager.step()
        assert (result.status, result.error_type, result.counted) == ("data_end", "DataError", False)
        with pytest.raises(accelmgr.DataError) as caught:
            result.raise_for_status()
        said = "LookupError: no row 4 in the file \\udcff.jpg"
        for part in ("step 3", said, "test_data.py", "in give_up", "in __iter__"):
            assert part in str(caught.value), str(caught.value)
        with pytest.raises(accelmgr.DataError, match="no row 4"):  # The loop must not end silently.
            list(manager.steps(1))


class Misses:
    """A map-style dataset whose table is shorter than its length."""

    def __init__(self, error):
        self.error = error

    def __len__(self):
        return 100

    def __getitem__(self, index):
        if index == 4:
            self.look_up(index)
        return {"x": row(index)}

    def look_up(self, index):
        raise self.error(f"no row {index} in the table")


@pytest.mark.parametrize("error", [IndexError, StopIteration])
def test_an_indexed_dataset_that_raises_before_its_length_has_failed_and_not_ended(error):
    with accelmgr.Manager(Line(), Misses(error), nprocs=2, batch_size_per_device=1) as manager:
        with pytest.raises(accelmgr.DataError, match=f"{error.__name__}: no row 4 in the table") as caught:
            list(manager.steps())
        assert "in look_up" in str(caught.value)
        assert manager.statistics().steps == 2


class Changes:
    def __init__(self, later):
        self.later = later

    def __iter__(self):
        for i in range(3):
            yield {"x": row(i), "factor": 1.0}
        while True:
            yield self.later


UNLIKE = {
    "structure": ({"x": row(0)}, "element 3 of the dataset has x, the first one x, factor"),
    "shape": (
        {"x": torch.zeros(4), "factor": 1.0},
        r"field 'x' of element 3 .*float32 \[4\].*float32 \[3\].*collate_fn",
    ),
    "sparse": ({"x": row(0).to_sparse(), "factor": 1.0}, "field 'x' of element 3 of the dataset is not a tensor"),
    "dtype": ({"x": row(0).double(), "factor": 1.0}, "field 'x' of element 3 .*float64"),
    "text": ({"x": row(0), "factor": "one"}, "field 'factor' of element 3 of the dataset is not a tensor"),
}


@pytest.mark.parametrize("kind", UNLIKE)
def test_an_element_unlike_the_first_is_named(kind):
    later, message = UNLIKE[kind]
    elements = Elements(Changes(later), {"as_bytes": False, "max_element_bytes": 0})
    assert all(elements.next() is not None for _ in range(3))
    with pytest.raises(accelmgr.DataError, match=message):
        elements.next()


def test_an_element_that_is_longer_than_the_user_has_said_is_named():
    elements = Elements([torch.zeros(10), torch.zeros(30_000)], {"as_bytes": True, "max_element_bytes": 65536})
    assert elements.next() is not None
    with pytest.raises(accelmgr.DataError, match=r"element 1 .* takes 1\d{5} bytes.*max_element_bytes = 65536"):
        elements.next()


def test_no_elements_and_no_dataset_are_refused():
    with pytest.raises(accelmgr.DataError, match="the dataset has no elements"):
        Elements([], {"as_bytes": False, "max_element_bytes": 0})
    with pytest.raises(accelmgr.DataError, match="dataset is a int, which is neither iterable nor indexed"):
        accelmgr.Manager(Line(), 7)


DRAWS = {
    "random": (random.Random, lambda one: one.random()),
    "NumPy": (np.random.default_rng, lambda one: float(one.random())),
    "NumPy, as before 1.17": (np.random.RandomState, lambda one: float(one.random_sample())),
    "torch": (
        lambda seed: torch.Generator().manual_seed(seed),
        lambda one: torch.rand((), generator=one).item(),
    ),
}


class Drawn(torch.utils.data.Dataset):
    """Draws from a generator that is an attribute of a part of it."""

    def __init__(self, kind, seed=1):
        self.parts = [types.SimpleNamespace(generator=DRAWS[kind][0](seed))]
        self.kind = kind

    def __len__(self):
        return 12

    def __getitem__(self, index):
        return torch.tensor(DRAWS[self.kind][1](self.parts[0].generator))


class Mean(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return (x * self.weight).mean()


@pytest.mark.parametrize("kind", DRAWS)
def test_a_dataset_s_own_generator_goes_on_where_it_was(kind, tmp_path):
    """In two epochs: when runners begin anew, when a run resumes, and where the script seeds it."""
    expected = Drawn(kind)
    expected = [expected[index].item() for index in range(24)]
    options = {"nprocs": 1, "batch_size_per_device": 1, "data__epochs": 2, "checkpoint__directory": str(tmp_path)}
    found = []
    with accelmgr.Manager(Mean(), Drawn(kind), **options) as manager:
        for step in range(16):
            if step in (4, 14):
                manager.refresh()
            found.append(manager.step().loss)
        written = save(manager)
    with accelmgr.Manager(Mean(), Drawn(kind), checkpoint__resume=written.path, **options) as manager:
        found += [manager.step().loss for _ in range(8)]
    assert found == pytest.approx(expected)
    dataset, seeded = Drawn(kind), Drawn(kind, seed=2)
    others = [seeded[index].item() for index in range(3)]
    with accelmgr.Manager(Mean(), dataset, prefetch=0, **options | {"checkpoint__directory": ""}) as manager:
        assert manager.step().loss == pytest.approx(expected[0])
        dataset.parts[0].generator = Drawn(kind, seed=2).parts[0].generator
        manager.refresh()
        assert [manager.step().loss for _ in range(2)] == pytest.approx(others[1:])  # Element 0 is read again first.
