# Runs in: the courier.
"""How long a round may take, and how much it carries: from the rounds that were made."""

from __future__ import annotations

import statistics
import time
from collections import deque
from typing import Any

from accelmgr.outer._agreement import Agreement

FIRST_ATTEMPT_S = 120.0
FIRST_OFFERS_S = 30.0
REMEMBERED = 20
"""Rounds whose times say how long the next one may take."""
MOST_RESTS = 20
"""For who has not caught up after so many rounds the others do not wait any longer: its link is slower than theirs."""


class Times:
    """How long something takes, from the last times that it was done."""

    def __init__(self, first_s: float, least_s: float) -> None:
        """first_s: the bound until three times are known."""
        self._first_s, self._least_s = first_s, least_s
        self._seconds: deque[float] = deque(maxlen=REMEMBERED)

    def add(self, seconds: float) -> None:
        self._seconds.append(seconds)

    @property
    def bound(self) -> float:
        """Twice the median plus four times the median distance from it."""
        if len(self._seconds) < 3:
            return self._first_s
        median = statistics.median(self._seconds)
        spread = statistics.median(abs(each - median) for each in self._seconds)
        return max(self._least_s, 2 * median + 4 * spread)


class Pace:
    """Not for several threads."""

    def __init__(self, agreement: Agreement, sizes: list[int], fragment_s: float) -> None:
        """sizes: numbers in each block."""
        self._agreement, self._sizes, self._fragment_s = agreement, sizes, fragment_s
        self._attempts, self._lags = Times(FIRST_ATTEMPT_S, 5.0), Times(FIRST_OFFERS_S, 2.0)
        self._rates: deque[float] = deque(maxlen=REMEMBERED)  # Numbers that a round has carried in a second.
        self._attempt: tuple[Any, float] = (None, 0.0)
        self._was_late, self._doublings = False, 0
        self._round: Any = None
        self._round_at = self._rest_s = 0.0
        self._rests: dict[str, int] = {}  # After how many rounds in a row a peer was catching up.
        self._offering: set[str] = set()
        self._first_offer_at = 0.0

    def exchanged(self, count: int, seconds: float) -> None:
        """A mean of `count` numbers has come in so many seconds."""
        self._attempts.add(seconds)
        self._rates.append(count / seconds)
        self._rest_s = count / statistics.median(self._rates)

    def late(self) -> int:
        """How many times over the present attempt has used up its time; 0: it is in time.

        After an attempt that was late, the next one of the round has twice the time.
        """
        record, present = self._agreement.record, self._agreement.present()
        attempt = record.lineage, record.round, record.promised, present
        has_begun = present is not None or record.promised[0] > 0 or not self._agreement.waiting_for
        if attempt != self._attempt[0] or not has_begun:
            before = self._attempt[0]
            self._doublings = self._doublings + self._was_late if before and before[:2] == attempt[:2] else 0
            self._attempt = attempt, time.monotonic()
        bound = self._attempts.bound
        if present is not None and self._rates:
            bound = max(bound, 2 * sum(self._sizes[slice(*present[1].blocks)]) / statistics.median(self._rates))
        taken = (time.monotonic() - self._attempt[1]) / (bound * 2 ** min(self._doublings, 10))
        self._was_late = taken > 0.8  # For another peer it may have been, which has begun the next attempt.
        return int(taken)

    def offers_are_late(self) -> bool:
        """Whether those that are missing have taken longer than offers did in the last rounds."""
        now, mine = time.monotonic(), self._agreement.record
        offering = {each.peer for each in self._agreement.peers() if each.offer is not None}
        if (mine.lineage, mine.round) != self._round:
            self._round, self._offering = (mine.lineage, mine.round), set()
            self._round_at = now
            self._rests = {peer: self._rests.get(peer, 0) + 1 for peer in self._agreement.catching_up()}
        if offering - self._offering:
            if self._offering:
                self._lags.add(now - self._first_offer_at)
            else:
                self._first_offer_at = now
        self._offering |= offering
        return bool(self._offering) and now - self._first_offer_at > self._lags.bound

    def rests_for(self) -> set[str]:
        """Peers that catch up and now have the link for themselves: after each round for as long as one takes.

        Rounds may use all of it, and a peer that gets a state falls behind while it comes.
        """
        if time.monotonic() - self._round_at >= self._rest_s:
            return set()
        return {peer for peer in self._agreement.catching_up() if self._rests.get(peer, 0) <= MOST_RESTS}

    def next_blocks(self) -> tuple[int, int]:
        """Those after the present ones, as many as the last rounds would have carried in `fragment_s`."""
        if not self._rates:
            return 0, len(self._sizes)
        begin = self._agreement.record.blocks[1] % len(self._sizes)
        end, left = begin + 1, statistics.median(self._rates) * self._fragment_s - self._sizes[begin]
        while end < len(self._sizes) and self._sizes[end] <= left:
            left -= self._sizes[end]
            end += 1
        return begin, end
