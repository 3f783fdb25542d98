# Runs in: the courier.
"""Which elements of the data each peer has: what rounds decide, so that none is used twice."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

Range = tuple[int, int]


class Leases(NamedTuple):
    """After a round. Elements have the numbers 0, 1, 2, ..., and begin again at the end of the data."""

    held: tuple[tuple[str, int, int], ...] = ()
    """A peer, and the begin and end of a range that it uses, in the order in which it uses them."""
    returned: tuple[Range, ...] = ()
    """Of peers that have gone."""
    next: int = 0
    """Nobody has had this element yet, or any after it."""

    def of(self, peer: str) -> list[Range]:
        return [(begin, end) for holder, begin, end in self.held if holder == peer]

    def after_round(self, used: Mapping[str, int], wanted: Mapping[str, int]) -> Leases:
        """used: how many elements of its ranges each member's change has. wanted: how many each living peer holds."""
        held, returned, left = list[tuple[str, int, int]](), list(self.returned), dict(used)
        for peer, begin, end in self.held:
            done = min(left.get(peer, 0), end - begin)
            left[peer] = left.get(peer, 0) - done
            if peer not in wanted:
                returned.append((begin, end))
            elif begin + done < end:
                held.append((peer, begin + done, end))
        following = self.next
        for peer in sorted(wanted):
            lacking = wanted[peer] - sum(end - begin for holder, begin, end in held if holder == peer)
            while lacking > 0:
                begin, end = returned.pop(0) if returned else (following, following + lacking)
                if end - begin > lacking:
                    returned.insert(0, (begin + lacking, end))
                    end = begin + lacking
                held.append((peer, begin, end))
                following, lacking = max(following, end), lacking - (end - begin)
        return Leases(tuple(held), tuple(returned), following)


def not_given(given: list[Range], ranges: list[Range]) -> list[Range]:
    """What of a peer's ranges its host was not given: all that is behind what it was given last."""
    rest, known = list(ranges), 0
    for begin, end in reversed(given):
        known += end - begin
        if rest and begin <= rest[0][0] < end:
            known -= rest[0][0] - begin
            break
    else:
        known = 0
    while rest and known >= rest[0][1] - rest[0][0]:
        known -= rest[0][1] - rest[0][0]
        rest.pop(0)
    if rest and known > 0:
        rest[0] = rest[0][0] + known, rest[0][1]
    return rest
