# Runs in: the courier.
"""How members agree on a round: each publishes a record, reads those of the others, and advances.

A round is decided by the *voters*, which the round before it has named: the peers of this lineage that answered then
and lacked one round at most, also those that were late or whose change it did not have. They do it as in Paxos with a
ballot for each attempt (Lamport, "Paxos Made Simple", 2001). The owner of the first ballot proposes without asking for
promises.

    offers of two peers or more -> proposal(ballot) -> every member reduces its part, and has the mean
      -> a voter that has the mean accepts(ballot, proposal, digest of the mean) -> a majority has accepted: decided
    no decision in time, or a member of the proposal is gone: prepare(a higher ballot) -> a majority has promised
      -> propose what the highest ballot among them has accepted, or a new proposal without who is gone

What a member says in its record it never takes back in that round, so any order, loss or repetition of messages is
harmless. Who has lost its memory must not come back under its former name.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
from collections.abc import Collection, Iterable
from typing import Any

from accelmgr.outer._record import Accepted, Ballot, Proposal, Record

LEAST_VOTERS = 3
"""So many decide a round, if there are as many: then one may be lost."""
MOST_LINEAGE = 1000
"""Characters, as long as there were fewer divisions than that."""


def precedence(record: Record) -> tuple[float, int, int, str]:
    """Orders records. A peer follows the smallest: that with most work in its rounds, whatever their number.

    Then that of most rounds, then of most divisions of a swarm.
    """
    return -record.committed[1].total, -record.round, -record.lineage.count("/"), record.lineage


def quorum(voters: Iterable[str]) -> int:
    return len(tuple(voters)) // 2 + 1


class Agreement:
    """A peer's record, and what follows from those of the others. It has no clock, no thread and no network."""

    def __init__(self, record: Record, min_peers: int = 2) -> None:
        """record: as a new peer or one that goes on has it. min_peers: see DiLoCo."""
        self.record = record
        self._min_peers = min_peers
        self.heard: dict[str, Record] = {}
        """The last record of each other peer."""
        self.means: dict[str, str] = {}
        """The SHA-256 of each mean that this peer has, by the proposal's key."""
        self.waiting_for = ""
        """Why there is no round; empty while one is under way."""

    # What happens

    def _change(self, **fields: Any) -> None:
        self.record = dataclasses.replace(self.record, version=self.record.version + 1, **fields)

    def beat(self) -> None:
        """A new version without news tells the others that this peer lives."""
        self._change()

    def hear(self, record: Record) -> None:
        known = self.heard.get(record.peer)
        if record.peer != self.record.peer and (known is None or known.version < record.version):
            self.heard[record.peer] = record

    def offer(self, weight: float, used: int = 0) -> None:
        """Offers a change of `record.blocks` to the next round. used: elements that it has."""
        self._change(offer=weight, used=used)

    def drop(self, elements: int) -> None:
        """So many elements that are leased to this peer are in no change."""
        if elements != self.record.dropped:
            self._change(dropped=elements)

    def lack(self, peer: str, of_mean: bool = False) -> None:
        """Says that the peer's change for the present proposal, or its part of the mean, does not come."""
        if (present := self.present()) is None:
            return
        if self.record.lacking_in != present[0]:
            self._change(lacking=(), lacking_means=(), lacking_in=present[0])
        name = "lacking_means" if of_mean else "lacking"
        if peer not in (known := getattr(self.record, name)):
            self._change(**{name: (*known, peer)})

    def want(self, wants: dict[str, str]) -> None:
        if wants != self.record.wants:
            self._change(wants=wants)

    def begin(self, **fields: Any) -> None:
        """Stands after another round, of this lineage or of another, without offer, promise or vote."""
        fresh: dict[str, Any] = {"offer": None, "accepted": None, "prepared": None, "proposal": None, "lacking": ()}
        fresh |= {"lacking_means": (), "dropped": 0, "used": 0}
        self._change(**{**fresh, **fields})
        if "promised" not in fields:
            self._change(promised=(0, self._turns()[0]))
        self.means.clear()

    def has_quorum(self, alive: set[str]) -> bool:
        """Whether a majority of the voters answers."""
        voters = self.record.voters
        return len({self.record.peer, *alive} & set(voters)) >= quorum(voters)

    def say_quorum(self, alive: set[str]) -> None:
        """Tells others whether this peer hears a majority of the voters."""
        if (has_quorum := self.has_quorum(alive)) != self.record.has_quorum:
            self._change(has_quorum=has_quorum)

    def hears_of_quorum(self, alive: set[str]) -> bool:
        """Whether this peer, or one that answers and is of its lineage, hears a majority of the voters."""
        others = [self.heard[peer] for peer in alive if peer in self.heard]
        return self.record.has_quorum or any(each.has_quorum and each.lineage == self.record.lineage for each in others)

    def split(self) -> None:
        """Goes on without the voters. Others of this round join the lineage that begins here."""
        mine = self.record
        lineage = f"{mine.lineage}/{mine.round}.{mine.peer}"
        if len(lineage) > MOST_LINEAGE:
            lineage = "/" * lineage.count("/") + hashlib.sha256(lineage.encode()).hexdigest()
        fields = {name: getattr(mine, name) for name in ("round", "digest", "blocks", "committed")}
        self.begin(lineage=lineage, voters=(mine.peer,), **fields)

    # What follows

    def differing(self) -> list[str]:
        """Peers that stand where this one stands and have another digest."""
        return sorted(each.peer for each in self.peers() if each.digest != self.record.digest)

    def peers(self) -> list[Record]:
        """Records of the peers that stand where this one stands, its own first."""
        mine = self.record
        same = [each for each in self.heard.values() if (each.lineage, each.round) == (mine.lineage, mine.round)]
        return [mine, *same]

    def is_awaited(self, alive: set[str]) -> bool:
        """Whether another peer has offered a change to the next round, and this one has not."""
        return self.record.offer is None and any(each.offer and each.peer in alive for each in self.peers())

    def _is_one_behind(self, other: Record) -> bool:
        return (other.lineage, other.round + 1) == (self.record.lineage, self.record.round)

    def catching_up(self) -> set[str]:
        """Peers that get a state, or lack more than one round of this lineage."""
        mine, others = self.record, self.heard.values()
        behind = {each.peer for each in others if each.lineage == mine.lineage and each.round + 1 < mine.round}
        return behind.union(each.peer for each in others if each.wants)

    def is_one_ahead(self, alive: set[str]) -> bool:
        """Whether a living peer has not committed yet what this one has committed last."""
        return any(self._is_one_behind(self.heard[peer]) for peer in alive if peer in self.heard)

    def ahead(self, alive: set[str]) -> Record | None:
        """A living peer that this one must follow: with more work, a lineage to join, or the digest of most."""
        others = [self.heard[peer] for peer in alive if peer in self.heard]
        best = min(others, key=precedence, default=self.record)
        if (best.lineage, best.round) == (self.record.lineage, self.record.round + 1):
            return None  # decided() says what that round was.
        return best if precedence(best) < precedence(self.record) else self._other_digest(alive)

    def _other_digest(self, alive: set[str]) -> Record | None:
        """A peer that stands here and has the digest of most who do.

        If two digests are equally frequent, and all who answer stand here, the smaller one counts.
        """
        here = [each for each in self.peers() if each is self.record or each.peer in alive]
        counts = collections.Counter(each.digest for each in here)
        digest = min(counts, key=lambda each: (-counts[each], each))
        all_are_here = len(here) == len(alive) + 1 and self.has_quorum(alive)  # Others may decide it when they come.
        if digest == self.record.digest or 2 * counts[digest] + all_are_here <= len(here):
            return None
        return next(each for each in here if each.digest == digest)

    def committed_next(self) -> list[Record]:
        """Peers that have committed one round more than this one."""
        following = self.record.lineage, self.record.round + 1
        return [each for each in self.heard.values() if (each.lineage, each.round) == following]

    def decided(self) -> Accepted | None:
        """What a majority of the voters has accepted in one ballot, or a peer has committed."""
        for each in self.committed_next():
            return each.committed
        votes: dict[tuple[Ballot, str], list[Accepted]] = {}  # In a ballot there is one proposal.
        for each in self.peers():
            if each.accepted is not None and each.peer in self.record.voters:
                ballot, _, mean = each.accepted
                votes.setdefault((ballot, mean), []).append(each.accepted)
        return next((equal[0] for equal in votes.values() if len(equal) >= quorum(self.record.voters)), None)

    def present(self) -> tuple[Ballot, Proposal] | None:
        """The proposal with the highest ballot, unless this peer has promised a higher one."""
        made = [each.proposal for each in self.peers() if each.proposal is not None]
        best = max(made, key=lambda each: each[0], default=None)
        return best if best is not None and best[0] >= self.record.promised else None

    def advance(
        self,
        alive: set[str],
        late: int,
        offers_are_late: bool,
        next_blocks: tuple[int, int],
        rests_for: Collection[str] = (),
    ) -> None:
        """Says in the record what follows from all records.

        alive: the other peers that answer. late: see Pace.
        offers_are_late: the remaining offers have taken longer to come than offers take. next_blocks: what a proposal
        of this peer says that the round after it averages. rests_for: while one of these lives, no round begins now.
        """
        self.waiting_for = ""
        is_voter = self.record.peer in self.record.voters
        if is_voter:
            self._promise_and_accept()
            if self.record.prepared is not None and self.record.prepared == self.record.promised:
                if self.record.proposal is None or self.record.proposal[0] < self.record.prepared:
                    self._propose_promised(alive, next_blocks)
            elif self.present() is None and self.record.promised[0] == 0:
                self._propose_first(alive, offers_are_late, late, next_blocks, rests_for)
                return
            if self.decided() is None and self._must_try_again(alive, late > 0):
                self._prepare(alive, late)
        elif self.present() is None:
            self.waiting_for = self._missing_offers(alive, offers_are_late, rests_for)

    def _promise_and_accept(self) -> None:
        asked = [each.prepared for each in self.peers() if each.prepared is not None]
        if asked and max(asked) > self.record.promised:
            self._change(promised=max(asked))
        if (present := self.present()) is None:
            return
        ballot, proposal = present
        if ballot > self.record.promised:
            self._change(promised=ballot)
        mean = self.means.get(proposal.key)
        if mean is not None and (self.record.accepted is None or self.record.accepted[0] < ballot):
            self._change(accepted=(ballot, proposal, mean))

    def _lost(self) -> set[str]:
        """Whom to leave out, so that all others have got each other's parts of the last proposal.

        A peer that gets nobody's bytes lacks all others: it is left out, not they.
        """
        last = max((each.proposal[0] for each in self.peers() if each.proposal is not None), default=None)
        there = [each for each in self.peers() if each.lacking_in == last]
        lacking = {(each.peer, peer) for each in there for peer in each.lacking}
        # Who has sent no part of the mean may itself wait for a change that somebody lacks.
        lacking = lacking or {(each.peer, peer) for each in there for peer in each.lacking_means}
        lost = {one for one, other in lacking if one == other}  # They say so themselves.
        while left := [pair for pair in lacking if not lost.intersection(pair)]:
            bad = collections.Counter(peer for pair in left for peer in pair)
            named = {peer for _, peer in left}
            lost.add(max(bad, key=lambda peer: (bad[peer], peer in named, peer)))
        return lost

    def _offering(self, alive: set[str]) -> list[Record]:
        """Who is lost is left out until the next round, unless there is no round without it."""
        there = [each for each in self.peers() if each.offer is not None and each.digest == self.record.digest]
        there = [each for each in there if each is self.record or each.peer in alive]
        lost = self._lost()
        others = [each for each in there if each.peer not in lost]
        return others if len(others) >= self._min_peers else there

    def _missing_offers(self, alive: set[str], offers_are_late: bool, rests_for: Collection[str] = ()) -> str:
        voters = self.record.voters
        offering = self._offering(alive)
        if not self.has_quorum(alive):
            living = len({self.record.peer, *alive} & set(voters))
            return f"{quorum(voters)} of the {len(voters)} members of the swarm; {living} answer"
        if len({self.record.peer, *alive}) < self._min_peers:
            return f"other peers: this one is alone, and a round needs {self._min_peers}"
        if len(offering) < self._min_peers:
            return f"changes: {len(offering)} of {self._min_peers} were offered"
        if behind := alive.intersection(rests_for):
            return f"peers that catch up: {', '.join(sorted(behind))}"
        # Who has not committed the last round yet is about to: if it were not waited for, it would be late for ever.
        known = self.peers() + [each for each in self.heard.values() if self._is_one_behind(each)]
        there = {each.peer for each in known} & {self.record.peer, *alive}
        late = sorted(there - {each.peer for each in offering})
        return f"changes of {', '.join(late)}" if late and not offers_are_late else ""

    def _propose(self, ballot: Ballot, alive: set[str], next_blocks: tuple[int, int]) -> None:
        offering = sorted(self._offering(alive), key=lambda each: each.peer)
        weights = tuple(float(each.offer or 0) for each in offering)
        members = tuple(each.peer for each in offering)
        mine = self.record
        last = mine.committed[1]
        dropped = {each.peer: each.dropped for each in self.peers()}
        dropped |= {each.peer: each.dropped + each.used for each in self.peers() if each not in offering}
        used = {each.peer: each.used for each in offering}
        living = [mine, *(each for name, each in self.heard.items() if name in alive and each.lineage == mine.lineage)]
        place = f"{mine.lineage} {mine.round + 1} {ballot}".encode()
        number = int.from_bytes(hashlib.sha256(place).digest()[:5], "little") + 1 << 16
        wanted = {each.peer: each.wanted for each in living if each.wanted > 0}
        leases = last.leases.after_round(dropped, used, wanted, number)
        proposal = Proposal(
            mine.round + 1,
            mine.lineage,
            members,
            weights,
            self._next_voters(living),
            mine.blocks,
            next_blocks,
            last.total + sum(weights),
            leases,
            ballot,
        )
        self._change(proposal=(ballot, proposal))

    def _next_voters(self, living: list[Record]) -> tuple[str, ...]:
        """Those that can soon decide the next round. Of peers that lack more than one, as many as make three."""
        nearest = sorted(living, key=lambda each: (-each.round, each.peer))
        near = sum(each.round + 1 >= self.record.round for each in nearest)
        return tuple(sorted(each.peer for each in nearest[: max(LEAST_VOTERS, near)]))

    def _propose_first(
        self,
        alive: set[str],
        offers_are_late: bool,
        late: int,
        next_blocks: tuple[int, int],
        rests_for: Collection[str],
    ) -> None:
        self.waiting_for = self._missing_offers(alive, offers_are_late, rests_for)
        if self.waiting_for:
            return
        if self.record.promised == (0, self.record.peer):
            self._propose((0, self.record.peer), alive, next_blocks)
            self._promise_and_accept()
        elif self.record.promised[1] not in alive or late > 0:
            self._prepare(alive, late)

    def _propose_promised(self, alive: set[str], next_blocks: tuple[int, int]) -> None:
        ballot = self.record.promised
        promised = [each for each in self.peers() if each.peer in self.record.voters and each.promised == ballot]
        if len(promised) < quorum(self.record.voters):
            return
        accepted = [each.accepted for each in promised if each.accepted is not None]
        if accepted:
            self._change(proposal=(ballot, max(accepted, key=lambda each: each[0])[1]))
        elif missing := self._missing_offers(alive, True):
            self.waiting_for = missing
            return
        else:
            self._propose(ballot, alive, next_blocks)
        self._promise_and_accept()

    def _must_try_again(self, alive: set[str], is_late: bool) -> bool:
        if (present := self.present()) is None:
            return self.record.promised[1] not in {self.record.peer, *alive} or is_late
        if present[1].key in self.means or self.holders(present[1], alive):
            return is_late
        members, lost = set(present[1].members), self._lost()
        can_leave_out = not lost.intersection(each.peer for each in self._offering(alive))
        return is_late or not members <= {self.record.peer, *alive} or (can_leave_out and not members.isdisjoint(lost))

    def holders(self, proposal: Proposal, alive: set[str]) -> list[str]:
        """Living peers that have this proposal's mean."""
        has = [
            each.peer
            for each in list(self.heard.values())
            for held in (each.accepted, each.committed)
            if held is not None and held[1] == proposal and each.peer in alive
        ]
        return sorted(set(has))

    def _turns(self) -> list[str]:
        """The voters in the order in which they propose. Who was in the last round comes first: others may be late."""
        voters, number = self.record.voters, self.record.round
        last = self.record.committed[1].members
        order = [voters[(number + place) % len(voters)] for place in range(len(voters))]
        return sorted(order, key=lambda peer: peer not in last)

    def _prepare(self, alive: set[str], late: int) -> None:
        """Begins the next attempt, if it is this peer's turn. Living voters take turns: one may live and not hear."""
        living = [peer for peer in self._turns() if peer == self.record.peer or peer in alive]
        highest = max([self.record.promised, *(each.promised for each in self.peers())])
        if living[(highest[0] + max(0, late - 1)) % len(living)] == self.record.peer:
            ballot = highest[0] + 1, self.record.peer
            self._change(prepared=ballot, promised=ballot)
