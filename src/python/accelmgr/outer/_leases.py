# Runs in: the courier.
"""Which elements of the data each peer has: what rounds decide, so that none is used twice."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from accelmgr.outer._channel import Range

AGAIN, FIRST = 0, 1
"""Numbers of ranges that a host was given again because it had no other one, and of the one that it begins with."""


class Leases(NamedTuple):
    """After a round. Elements have the numbers 0, 1, 2, ..., and begin again at the end of the data."""

    held: tuple[tuple[str, int, int, int], ...] = ()
    """Peers, and ranges in the order in which they use them: begin, end, and a number that no other range ever has."""
    returned: tuple[tuple[int, int], ...] = ()
    """Of peers that have gone."""
    next: int = 0
    """Nobody has had this element yet, or any after it."""

    def of(self, peer: str) -> list[tuple[int, int, int]]:
        return [(begin, end, number) for holder, begin, end, number in self.held if holder == peer]

    def after_round(
        self, dropped: Mapping[str, int], used: Mapping[str, int], wanted: Mapping[str, int], number: int
    ) -> Leases:
        """dropped: how many elements at the begin of its ranges a peer has used for changes that no round has. used: of
        those after them, how many the changes in this round have. wanted: how many each living peer holds after it.
        number: of the first new range.
        """
        held, returned = list[tuple[str, int, int, int]](), list(self.returned)
        passed: dict[str, int] = {}  # Elements of a peer's ranges.
        for peer, begin, end, given in self.held:
            before = passed.get(peer, 0)
            passed[peer] = before + end - begin
            first = min(end, max(begin, begin + dropped.get(peer, 0) - before))
            rest = min(end, max(first, begin + dropped.get(peer, 0) + used.get(peer, 0) - before))
            given_back = [(begin, first)] if peer in wanted else [(begin, first), (rest, end)]
            returned += [each for each in given_back if each[0] < each[1]]
            if peer in wanted and rest < end:
                held.append((peer, rest, end, given))
        following = self.next
        for peer in sorted(wanted):
            lacking = wanted[peer] - sum(end - begin for holder, begin, end, _ in held if holder == peer)
            while lacking > 0:
                begin, end = returned.pop(0) if returned else (following, following + lacking)
                if end - begin > lacking:
                    returned.insert(0, (begin + lacking, end))
                    end = begin + lacking
                held.append((peer, begin, end, number))
                number += 1
                following, lacking = max(following, end), lacking - (end - begin)
        return Leases(tuple(held), tuple(returned), following)


def append(given: list[Range], added: Range) -> None:
    """Adds a range. Neighbours that were given again become one, which says how many elements, but not which."""
    if added.number == AGAIN and given and given[-1].number == AGAIN:
        last = given.pop()
        added = Range(0, last.size + added.size, AGAIN, last.place)
    given.append(added)


def needed(given: list[Range], held: list[tuple[int, int, int]], since: int) -> list[Range]:
    """The ranges that of_lease() and not_of_lease() still need, for changes that begin at `since` or later."""
    numbers = {number for *_, number in held}
    return [each for each in given if each.number in numbers or each.place + each.size > since]


def of_lease(given: list[Range], held: list[tuple[int, int, int]], used: int) -> int:
    """How many elements of `held` are among the first `used` ones that a host was given.

    given: those that are needed().
    """
    begins = {number: begin for begin, _, number in held}
    return sum(
        max(0, min(used - each.place, each.size) - (begins[each.number] - each.begin))
        for each in given
        if each.number in begins
    )


def not_of_lease(given: list[Range], held: list[tuple[int, int, int]], since: int, used: int) -> int:
    """How many of the elements from `since` to `used` are not of `held`, without those that were given again."""
    again = (
        max(0, min(used, each.place + each.size) - max(since, each.place)) for each in given if each.number == AGAIN
    )
    return used - since - of_lease(given, held, used) + of_lease(given, held, since) - sum(again)
