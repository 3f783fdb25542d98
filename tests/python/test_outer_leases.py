"""Which elements peers of accelmgr.outer use: none twice, and none left out, whoever comes and goes."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

from accelmgr.outer._leases import Leases


def elements(ranges: Iterable[tuple[int, ...]]) -> list[int]:
    return [number for begin, end, *_ in ranges for number in range(begin, end)]


@pytest.mark.parametrize("seed", range(20))
def test_each_element_is_used_once(seed: int) -> None:
    chance = random.Random(seed)
    leases, done, living = Leases(), list[int](), {"a"}
    for _ in range(60):
        if chance.random() < 0.3:
            living ^= {chance.choice("abcd")}
        members = {peer for peer in living if chance.random() < 0.7}
        dropped = {peer: chance.randint(0, len(elements(leases.of(peer)))) for peer in living}
        used = {peer: chance.randint(0, len(elements(leases.of(peer))) - dropped[peer]) for peer in members}
        for peer, count in used.items():
            done += elements(leases.of(peer))[dropped[peer] :][:count]
        leases = leases.after_round(dropped, used, {peer: chance.randint(1, 9) for peer in living})
        held = [number for peer in "abcd" for number in elements(leases.of(peer))]
        assert sorted(done + held + elements(leases.returned)) == list(range(leases.next))
        numbers = [number for peer in "abcd" for *_, number in leases.of(peer)]
        assert len(set(numbers)) == len(numbers)
        for peer in "abcd":
            assert [number for *_, number in leases.of(peer)] == sorted(number for *_, number in leases.of(peer))


def test_what_a_peer_has_left_is_leased_again_first() -> None:
    leases = Leases().after_round({}, {}, {"a": 4, "b": 4})
    assert leases == Leases((("a", 0, 4, 1), ("b", 4, 8, 2)), (), 8, 2)
    leases = leases.after_round({"b": 1}, {"b": 2}, {"b": 6})
    assert leases == Leases((("b", 7, 8, 2), ("b", 0, 4, 3), ("b", 4, 5, 4)), (), 8, 4)
