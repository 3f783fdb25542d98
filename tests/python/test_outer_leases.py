"""Which elements peers of accelmgr.outer use: none twice, and none left out, whoever comes and goes."""

from __future__ import annotations

import itertools
import json
import pathlib
import random
from collections.abc import Iterable

import pytest
import torch

import accelmgr
from accelmgr._memory.memfd import memfd_file
from accelmgr.outer import Leased
from accelmgr.outer._channel import Given, Range
from accelmgr.outer._leases import AGAIN, FIRST, Leases, append, needed, not_of_lease, of_lease


def elements(ranges: Iterable[tuple[int, ...]]) -> list[int]:
    return [number for begin, end, *_ in ranges for number in range(begin, end)]


@pytest.mark.parametrize("seed", range(20))
def test_each_element_is_used_once(seed: int) -> None:
    chance = random.Random(seed)
    leases, done, living = Leases(), list[int](), {"a"}
    for step in range(60):
        if chance.random() < 0.3:
            living ^= {chance.choice("abcd")}
        members = {peer for peer in living if chance.random() < 0.7}
        dropped = {peer: chance.randint(0, len(elements(leases.of(peer)))) for peer in living}
        used = {peer: chance.randint(0, len(elements(leases.of(peer))) - dropped[peer]) for peer in members}
        for peer, count in used.items():
            done += elements(leases.of(peer))[dropped[peer] :][:count]
        leases = leases.after_round(dropped, used, {peer: chance.randint(1, 9) for peer in living}, 100 * step)
        held = [number for peer in "abcd" for number in elements(leases.of(peer))]
        assert sorted(done + held + elements(leases.returned)) == list(range(leases.next))
        numbers = [number for peer in "abcd" for *_, number in leases.of(peer)]
        assert len(set(numbers)) == len(numbers)


def test_what_a_peer_has_left_is_leased_again_first() -> None:
    leases = Leases().after_round({}, {}, {"a": 4, "b": 4}, 1)
    assert leases == Leases((("a", 0, 4, 1), ("b", 4, 8, 2)), (), 8)
    leases = leases.after_round({"b": 1}, {"b": 2}, {"b": 6}, 7)
    assert leases == Leases((("b", 7, 8, 2), ("b", 0, 4, 7), ("b", 4, 5, 8)), (), 8)


def given(*ranges: tuple[int, int, int]) -> list[Range]:
    places = itertools.accumulate((end - begin for begin, end, _ in ranges), initial=0)
    return [Range(*each, place) for each, place in zip(ranges, places, strict=False)]


def test_what_a_host_has_used_of_its_lease() -> None:
    ranges = given((0, 4, 1), (10, 14, 2), (10, 14, AGAIN), (20, 24, 3))
    held = [(12, 14, 2), (20, 24, 3)]  # Rounds have 0 to 4 and 10 to 12.
    assert [of_lease(ranges, held, used) for used in (0, 5, 6, 7, 8, 10, 12, 13, 16)] == [0, 0, 0, 1, 2, 2, 2, 3, 6]
    assert not_of_lease(ranges, held, 6, 16) == 0
    assert not_of_lease(ranges, held, 3, 9) == 3


@pytest.mark.parametrize("seed", range(20))
def test_what_is_needed_of_ranges_tells_what_all_of_them_tell(seed: int) -> None:
    chance = random.Random(seed)
    sizes = [chance.randint(1, 5) for _ in range(60)]
    ranges = given(*((0, size, chance.choice((AGAIN, AGAIN, 100 + index))) for index, size in enumerate(sizes)))
    fresh = [each for each in ranges if each.number != AGAIN]
    held = [(chance.randrange(each.size), each.end, each.number) for each in chance.sample(fresh, min(4, len(fresh)))]
    since = chance.randint(0, sum(sizes))
    kept: list[Range] = []
    for each in ranges:
        append(kept, each)
    kept = needed(kept, held, since)
    for _ in range(100):
        begin, used = sorted((chance.randint(since, sum(sizes)), chance.randint(since, sum(sizes))))
        assert of_lease(kept, held, used) == of_lease(ranges, held, used)
        assert not_of_lease(kept, held, begin, used) == not_of_lease(ranges, held, begin, used)
    assert len(kept) <= 2 * len([each for each in fresh if each.place + each.size > since]) + len(held) + 1


def test_of_more_ranges_than_there_is_room_for_the_last_ones_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Given, "MOST", 4)
    with memfd_file("given") as file:
        file.truncate(Given.BYTES)
        memory = Given(file.fileno())
    for number in range(10):
        memory.add(number, 2 * number, number)
    assert memory.ranges(7) == [(7, 14, 7, 21), (8, 16, 8, 28), (9, 18, 9, 36)]
    assert memory.ranges()[0] == (6, 12, 6, 15)


def test_what_cannot_be_leased_is_refused_with_its_name() -> None:
    with pytest.raises(accelmgr.ConfigError, match="hold is 0; it must be at least 1"):
        Leased([1, 2], 0)  # type: ignore[arg-type]
    with pytest.raises(accelmgr.ConfigError, match="dataset has no element"):
        Leased([], 1)  # type: ignore[arg-type]


def test_who_is_alone_reads_what_it_holds_from_the_first_element_on() -> None:
    elements = iter(Leased(list("abc"), 5))  # type: ignore[arg-type]
    assert [next(elements) for _ in range(5)] == list("abcab")


def test_another_reader_goes_on_where_the_first_one_was() -> None:
    leased = Leased(list("abcde"), 3)  # type: ignore[arg-type]
    elements = iter(leased)
    assert [next(elements) for _ in range(3)] == list("abc")
    Given(leased.fd).add(3, 5, FIRST + 1)
    assert next(elements) == "d"
    state = json.loads(json.dumps(leased.state_dict()))
    leased.load_state_dict(state)
    assert next(iter(leased)) == "e"
    later = Leased(list("abcde"), 3)  # type: ignore[arg-type]
    later.load_state_dict(state)  # Of a peer that is no more.
    assert next(iter(later)) == "a"


class Logged(torch.utils.data.Dataset[torch.Tensor]):
    def __init__(self, log: pathlib.Path) -> None:
        self.log = log

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> torch.Tensor:
        with self.log.open("a") as file:
            file.write(f"{index}\n")
        return torch.full((2,), float(index))


def test_a_second_worker_of_a_loader_would_read_everything_again(tmp_path: pathlib.Path) -> None:
    loader = torch.utils.data.DataLoader(Leased(Logged(tmp_path / "log"), 8), batch_size=4, num_workers=2)
    with pytest.raises(accelmgr.ConfigError, match="num_workers is 2; it must be at most 1"):
        accelmgr.Manager(torch.nn.Linear(2, 1), loader, nprocs=1, loss=lambda y, _: y.mean())


def test_new_forks_do_not_read_from_the_beginning(tmp_path: pathlib.Path) -> None:
    dataset = Leased(Logged(tmp_path / "log"), 100)
    model = torch.nn.Sequential(torch.nn.Linear(2, 1))
    with accelmgr.Manager(model, dataset, nprocs=1, batch_size_per_device=2, loss=lambda y, _: y.mean()) as manager:
        for _ in range(3):
            manager.step().raise_for_status()
        manager.refresh()
        for _ in range(3):
            manager.step().raise_for_status()
    read = [int(line) for line in (tmp_path / "log").read_text().split()]
    assert read.count(1) == 1  # The first one is read for its shape.
    assert set(range(12)) <= set(read)
