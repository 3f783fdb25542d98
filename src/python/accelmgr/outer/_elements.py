# Runs in: the courier.
"""Which elements the host is given, and which of those that are leased to this peer it has used."""

from __future__ import annotations

from accelmgr.outer._agreement import Agreement
from accelmgr.outer._channel import Given, Range
from accelmgr.outer._leases import AGAIN, append, needed, not_of_lease, of_lease


class Elements:
    def __init__(self, agreement: Agreement, given: Given) -> None:
        """given: what the host has of the courier before this one, and what it is given from now on."""
        self._agreement, self._given = agreement, given
        self._ranges: list[Range] = []
        for before in given.ranges():
            append(self._ranges, before)

    @property
    def held(self) -> list[tuple[int, int, int]]:
        return self._agreement.record.committed[1].leases.of(self._agreement.record.peer)

    def give(self) -> None:
        """What is leased to this peer; when the host has used up all, the last again."""
        known = {each.number for each in self._ranges}
        for lease in self.held:
            if lease[2] not in known:
                append(self._ranges, self._given.add(*lease))
        if self._given.is_used_up:
            for begin, end, *_ in self.held or self._given.last():
                append(self._ranges, self._given.add(begin, end, AGAIN))

    # since, used: how many elements the host had used when it began a change, and at its end.

    def begin_change(self, since: int) -> None:
        self._ranges = needed(self._ranges, self.held, since)

    def are_of_others(self, since: int, used: int) -> bool:
        """Whether a change has elements that were leased to others while this peer was gone."""
        return self._agreement.record.wanted > 0 and not_of_lease(self._ranges, self.held, since, used) > 0

    def count(self, since: int, used: int) -> int:
        """How many of those that are leased to this peer a change has."""
        return self._of_lease(used) - self._of_lease(since)

    def drop(self, used: int) -> None:
        """All before are in no change."""
        self._agreement.drop(self._of_lease(used))

    def _of_lease(self, used: int) -> int:
        return of_lease(self._ranges, self.held, used)
