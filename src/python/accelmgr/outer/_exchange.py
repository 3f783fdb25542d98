# Runs in: the courier.
"""The bytes of one round: each member reduces its part of all changes, and gets the other parts of the mean."""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import statistics
import time
from collections.abc import Callable, Collection, Iterator

import torch

from accelmgr.outer._payload import GROUP, check, decode, encode, part_of, size_of
from accelmgr.outer._record import Proposal
from accelmgr.outer._transport import Absent, Transport

POLL_S = 0.5
"""A fetch that can be given up is made in pieces of this length."""
AGAIN_S = 0.1
"""Before a peer is asked again that does not answer, or that has nothing yet."""


class Cancelled(Exception):
    pass


class Exchange:
    """Gets the mean of a proposal. mean() runs in a thread of its own, and calls back from there."""

    def __init__(
        self,
        proposal: Proposal,
        peer: str,
        transport: Transport,
        kind: str,
        count: int,
        bound: float | None,
        *,
        holders: Callable[[], list[str]],
        lacks: Callable[[str], None],
        says: Callable[[str], None],
        is_late: Callable[[], None],
    ) -> None:
        """count: numbers of the proposal's blocks. bound: see DiLoCo. holders: peers that have the whole mean.

        lacks: called with a peer whose bytes do not come. says: called with a warning. is_late: called when something
        was published after it was given up.
        """
        self.proposal, self.published = proposal, list[str]()
        self.is_cancelled = False
        self.seconds = 0.0
        self._parts: dict[tuple[str, str], bytes] = {}  # What has come, until there is a mean.
        self.missing = set[str]()
        """Members whose change has not come; if has_changes, those whose part of the mean has not."""
        self.has_changes = False
        self._peer, self._transport, self._kind, self._count, self._bound = peer, transport, kind, count, bound
        self._holders, self._lacks, self._says, self._is_late = holders, lacks, says, is_late

    def _publish(self, key: str, data: bytes) -> None:
        self.published.append(f"{self.proposal.key}/{key}")
        self._transport.publish(self.published[-1], data)
        if self.is_cancelled:
            self._is_late()
            raise Cancelled

    def forget(self, kept: Collection[str]) -> None:
        """Gives up what was published for this proposal, but for `kept`. For the main thread, which keeps means."""
        self.is_cancelled = True
        for key in set(self.published).difference(kept):
            with contextlib.suppress(OSError):  # It stays.
                self._transport.publish(key, None)

    def _fetch(self, key: str, peer: str) -> bytes:
        """Waits until it has come, or a holder has the whole mean. Raises Absent then."""
        while True:
            if self.is_cancelled:
                raise Cancelled
            try:
                return self._transport.fetch(f"{self.proposal.key}/{key}", peer, time.monotonic() + POLL_S)
            except Absent as absent:
                if absent.is_gone:
                    self._lacks(peer)
                    time.sleep(AGAIN_S)
                if self._holders():
                    raise

    def mean(self, change: torch.Tensor | None) -> bytes:
        """change: of this peer, if it is a member. Returns the whole mean, encoded part by part.

        Raises Cancelled.
        """
        begin = time.monotonic()
        data = None
        while data is None:
            try:
                self.missing.clear()
                data = self._from_holder()
                if data is None and change is not None and self._peer in self.proposal.members:
                    data = self._made(change)  # Who has the mean may have lost it, and wait for this peer's part.
                elif data is None:
                    time.sleep(AGAIN_S)
            except Absent:
                continue
        self._parts.clear()
        self.seconds = max(1e-6, time.monotonic() - begin)
        self.publish_mean(data)
        return data

    def publish_mean(self, mean: bytes) -> None:
        self._publish("mean", mean)

    def _from_holder(self) -> bytes | None:
        """If no voter says that it has the mean, a peer that is no member asks all members: these may have it, too."""
        is_member = self._peer in self.proposal.members
        for holder in self._holders() or (() if is_member else self.proposal.members):
            with contextlib.suppress(Absent, ValueError):
                mean = self._transport.fetch(f"{self.proposal.key}/mean", holder, time.monotonic() + POLL_S)
                check_mean(mean, self.proposal, self._count, self._kind)
                return mean
        if self.is_cancelled:
            raise Cancelled
        return None

    def _made(self, change: torch.Tensor) -> bytes:
        members = self.proposal.members
        mine = members.index(self._peer)
        if not self.published:
            for index in range(len(members)):
                self._publish(str(index), encode(change[part_of(self._count, index, len(members))], self._kind))
        with concurrent.futures.ThreadPoolExecutor(min(len(members), 16)) as pool:
            self.has_changes, self.missing = False, set(members)
            parts = list(pool.map(lambda member: self._part(str(mine), member), members))
            reduced = self._reduced(parts, part_of(self._count, mine, len(members)))
            self._publish(f"mean/{mine}", encode(reduced, self._kind))
            self.has_changes, self.missing = True, set(members)
            return b"".join(pool.map(self._part_of_mean, range(len(members))))

    def _part(self, key: str, member: str) -> bytes:
        part = self._parts[key, member] = self._parts.get((key, member)) or self._fetch(key, member)
        self.missing.discard(member)
        return part

    def _part_of_mean(self, index: int) -> bytes:
        """Raises Absent also for bytes that are no such part."""
        member, place = self.proposal.members[index], part_of(self._count, index, len(self.proposal.members))
        part = self._part(f"mean/{index}", member)
        try:
            check(part, place.stop - place.start, self._kind)
        except ValueError as error:
            self._says(f"the part of {member} in the mean of round {self.proposal.number} is none: {error}")
            self._lacks(member)
            del self._parts[f"mean/{index}", member]
            time.sleep(AGAIN_S)
            raise Absent(str(error)) from error
        return part

    def _reduced(self, parts: list[bytes], place: slice) -> torch.Tensor:
        """The weighted mean in the order of members, of changes of at most `bound` times the median norm."""
        changes: list[tuple[str, float, torch.Tensor]] = []
        for member, weight, data in zip(self.proposal.members, self.proposal.weights, parts, strict=True):
            try:
                changes.append((member, weight, decode(data, place.stop - place.start, self._kind)))
            except ValueError as error:
                self._says(f"the change of {member} is left out of round {self.proposal.number}: {error}")
        norms = [float(torch.linalg.vector_norm(change)) for _, _, change in changes]
        counted = [norm for norm, (_, weight, _) in zip(norms, changes, strict=True) if weight > 0 and norm > 0]
        most = self._bound * statistics.median(counted) if self._bound and counted else float("inf")
        heaviest = max((weight for _, weight, _ in changes), default=0.0) or 1.0  # No product is more than a change.
        total = torch.zeros(place.stop - place.start)
        for (member, weight, change), norm in zip(changes, norms, strict=True):
            if norm > most:
                self._says(
                    f"the change of {member} is scaled down in round {self.proposal.number}: its norm is {norm:.3g}, "
                    f"and at most {most:.3g} counts, {self._bound:g} times the median"
                )
            total.add_(change, alpha=weight / heaviest * min(1.0, most / norm if norm > 0 else 1.0))
        return total.div_(sum(weight / heaviest for _, weight, _ in changes) or 1.0)


def _parts(mean: bytes, proposal: Proposal, count: int, kind: str) -> Iterator[tuple[slice, bytes]]:
    """Of each member: which numbers, and their bytes. Raises ValueError."""
    places = [part_of(count, index, len(proposal.members)) for index in range(len(proposal.members))]
    sizes = [size_of(place.stop - place.start, kind) for place in places]
    if sum(sizes) != len(mean):
        raise ValueError(f"a mean of {len(mean)} bytes; {sum(sizes)} were expected")
    begin = 0
    for place, size in zip(places, sizes, strict=True):
        yield place, mean[begin : begin + size]
        begin += size


def check_mean(mean: bytes, proposal: Proposal, count: int, kind: str) -> None:
    """Raises ValueError."""
    for place, data in _parts(mean, proposal, count, kind):
        check(data, place.stop - place.start, kind)


def decoded(mean: bytes, proposal: Proposal, count: int, kind: str) -> torch.Tensor:
    """The mean's numbers. Raises ValueError."""
    values = torch.empty(-(-count // GROUP) * GROUP)
    for place, data in _parts(mean, proposal, count, kind):
        decode(data, place.stop - place.start, kind, values[place.start :])
    return values[:count]


def digest_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
