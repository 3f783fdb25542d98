"""Which elements peers of accelmgr.outer use: none twice, and none left out, whoever comes and goes."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

import accelmgr
from accelmgr.outer import Leased
from accelmgr.outer._leases import AGAIN, Leases, not_of_lease, of_lease


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


def test_what_a_host_has_used_of_its_lease() -> None:
    given = [(0, 4, 1), (10, 14, 2), (10, 14, AGAIN), (20, 24, 3)]
    held = [(12, 14, 2), (20, 24, 3)]  # Rounds have 0 to 4 and 10 to 12.
    assert [of_lease(given, held, used) for used in (0, 5, 6, 7, 8, 10, 12, 13, 16)] == [0, 0, 0, 1, 2, 2, 2, 3, 6]
    assert not_of_lease(given, held, 6, 16) == 0
    assert not_of_lease(given, held, 3, 9) == 3


def test_what_cannot_be_leased_is_refused_with_its_name() -> None:
    with pytest.raises(accelmgr.ConfigError, match="hold is 0; it must be at least 1"):
        Leased([1, 2], 0)  # type: ignore[arg-type]
    with pytest.raises(accelmgr.ConfigError, match="dataset has no element"):
        Leased([], 1)  # type: ignore[arg-type]


def test_who_is_alone_reads_what_it_holds_from_the_first_element_on() -> None:
    elements = iter(Leased(list("abc"), 5))  # type: ignore[arg-type]
    assert [next(elements) for _ in range(5)] == list("abcab")
