"""Which elements peers of accelmgr.outer use: none twice, and none left out, whoever comes and goes."""

from __future__ import annotations

import random

import pytest

from accelmgr.outer._leases import Leases, not_given


def elements(ranges: list[tuple[int, int]]) -> list[int]:
    return [number for begin, end in ranges for number in range(begin, end)]


@pytest.mark.parametrize("seed", range(20))
def test_each_element_is_used_once(seed: int) -> None:
    chance = random.Random(seed)
    leases, done, living = Leases(), list[int](), {"a"}
    given: dict[str, list[tuple[int, int]]] = {}
    for _ in range(60):
        if chance.random() < 0.3:
            living ^= {chance.choice("abcd")}
        members = {peer for peer in living if chance.random() < 0.7}
        used = {peer: chance.randint(0, len(elements(leases.of(peer)))) for peer in members}
        for peer, count in used.items():
            done += elements(leases.of(peer))[:count]
        leases = leases.after_round(used, {peer: chance.randint(1, 9) for peer in living})
        held = [number for peer in "abcd" for number in elements(leases.of(peer))]
        assert sorted(done + held + elements(list(leases.returned))) == list(range(leases.next))
        for peer in living:
            before = given.setdefault(peer, [])
            before += not_given(before, leases.of(peer))
            assert not_given(before, leases.of(peer)) == []
            assert elements(before)[-len(elements(leases.of(peer))) :] == elements(leases.of(peer))
        for peer in given.keys() - living:
            del given[peer]  # It comes back under another name.


def test_what_a_peer_has_left_is_leased_again_first() -> None:
    leases = Leases().after_round({}, {"a": 4, "b": 4})
    assert leases == Leases((("a", 0, 4), ("b", 4, 8)), (), 8)
    leases = leases.after_round({"b": 3}, {"b": 6})
    assert leases == Leases((("b", 7, 8), ("b", 0, 4), ("b", 8, 9)), (), 9)
