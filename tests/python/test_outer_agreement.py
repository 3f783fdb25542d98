"""Rounds of accelmgr.outer as their members agree on them, under any order, loss and repetition of messages.

Members are objects without processes: a seed chooses which of them hears what next, when it is late, and which die.
"""

from __future__ import annotations

import dataclasses
import json
import random
import uuid
import zlib

import pytest

from accelmgr.outer import _pace
from accelmgr.outer._agreement import Agreement, precedence, quorum
from accelmgr.outer._leases import Leases
from accelmgr.outer._record import Accepted, Proposal, Record
from accelmgr.outer._transport import MOST_RECORD

ALL = (0, 1)


class Swarm:
    """Peers that have made one round together. `decisions` has what any of them has committed, by round."""

    def __init__(self, seed: int, size: int) -> None:
        self.chance = random.Random(seed)
        names = tuple(f"p{index}" for index in range(size))
        self.peers = {
            name: Agreement(Record(name, 0, "", "p0", 1, names, "digest 1", ALL, promised=(0, names[1 % size])))
            for name in names
        }
        self.dead: set[str] = set()
        self.decisions: dict[int, tuple[Proposal, str]] = {}
        self.said: dict[str, list[bytes]] = {name: [] for name in names}

    def commit(self, name: str, decided: Accepted) -> None:
        _, proposal, mean = decided
        known = self.decisions.setdefault(proposal.number, (proposal, mean))
        assert known == (proposal, mean), f"round {proposal.number} was decided twice"
        self.peers[name].begin(
            round=proposal.number,
            voters=proposal.voters,
            digest=f"digest {proposal.number}",
            blocks=proposal.next_blocks,
            committed=decided,
        )

    def act(self, name: str, is_calm: bool) -> None:
        """One peer hears some records, old ones too, and advances."""
        chance, peer = self.chance, self.peers[name]
        for other, records in self.said.items():
            if other != name and records and (is_calm or chance.random() < 0.5):
                newest = is_calm or chance.random() < 0.7
                peer.hear(Record.of_bytes(records[-1] if newest else chance.choice(records)))
        living = {other for other in self.peers if other not in self.dead and other != name}
        alive = living if is_calm else {other for other in living if chance.random() < 0.8}
        if peer.ahead(alive) is not None:
            self.catch_up(name)
        elif (decided := peer.decided()) is not None:
            self.commit(name, decided)
        else:
            if peer.record.offer is None and (is_calm or chance.random() < 0.3):
                peer.offer(chance.randint(1, 9))
            is_late = chance.random() < (0.02 if is_calm else 0.2)
            rests_for = peer.catching_up() if chance.random() < 0.5 else ()
            peer.advance(alive, is_late, is_calm or chance.random() < 0.3, ALL, rests_for)
            present = peer.present()
            if present is not None and not is_calm and chance.random() < 0.1:  # What a living peer sends may come late.
                peer.lack(chance.choice(present[1].members))
            if present is not None and (is_calm or chance.random() < 0.5):
                members = set(present[1].members)
                if not members & self.dead or peer.holders(present[1], alive):
                    peer.means[present[1].key] = f"mean of {present[1].key}"
                else:
                    for lost in members & self.dead:
                        peer.lack(lost)
                peer.advance(alive, False, False, ALL)
        self.said[name].append(peer.record.as_bytes())

    def catch_up(self, name: str) -> None:
        """As from another peer's state."""
        ahead = self.peers[name].ahead(set(self.peers) - {name})
        assert ahead is not None
        fields = ("lineage", "round", "voters", "digest", "blocks", "committed")
        self.peers[name].begin(**{field: getattr(ahead, field) for field in fields})

    def storm(self, length: int) -> None:
        """Living peers act in a random order, and some die."""
        for _ in range(length):
            if self.chance.random() < 0.01:
                self.kill()
            self.act(self.chance.choice(self.living()), is_calm=False)

    def living(self) -> list[str]:
        return [name for name in self.peers if name not in self.dead]

    def kill(self) -> None:
        """A peer that the last round's quorum can do without."""
        victim = self.chance.choice(self.living())
        newest = max(peer.record.round for name, peer in self.peers.items())
        for number in (newest, newest - 1):
            voters = self.decisions[number][0].voters if number in self.decisions else tuple(self.peers)
            if len(set(voters) - self.dead - {victim}) < quorum(voters):
                return
        self.dead.add(victim)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_a_round_is_decided_once(size: int) -> None:
    rounds = 0
    for seed in range(60):
        swarm = Swarm(seed, size)
        swarm.storm(300)
        rounds += len(swarm.decisions)
    assert rounds > 60  # The chaos has let rounds through.


@pytest.mark.parametrize("size", [2, 3, 5])
def test_rounds_go_on_when_calm_returns(size: int) -> None:
    went_on = 0
    for seed in range(30):
        swarm = Swarm(seed, size)
        swarm.storm(150)
        living = swarm.living()
        for _ in range(60):
            for name in living:
                swarm.act(name, is_calm=True)
            newest = max((swarm.peers[name].record for name in living), key=lambda record: record.round)
            if len(set(newest.voters) & set(living)) < quorum(newest.voters):
                break  # Who has died after a vote is a voter after that round, and its majority is gone.
        else:
            went_on += 1
            assert len(living) == 1 or len(swarm.decisions) > 5, f"seed {seed}"
    assert went_on > 10


def test_min_peers_go_on_without_the_majority_and_meet_the_others_again() -> None:
    swarm = Swarm(3, 5)
    swarm.dead = {"p2", "p3", "p4"}
    for name in ("p1", "p0"):
        swarm.peers[name].split()
    for _ in range(20):
        for name in ("p0", "p1"):
            swarm.act(name, is_calm=True)
    records = [swarm.peers[name].record for name in ("p0", "p1")]
    assert len({(record.lineage, record.round) for record in records}) == 1
    assert records[0].round > 3
    old = swarm.peers["p4"]
    old.hear(records[0])
    assert old.ahead({"p0"}) == records[0]


def test_who_was_late_in_a_round_decides_the_next_one_with_the_others() -> None:
    """Rounds of two in a swarm of three ended all rounds when one of the two was killed."""
    swarm = Swarm(4, 3)
    late = swarm.peers["p2"]
    late.offer = lambda weight, used=0: None  # type: ignore[method-assign]
    while not swarm.decisions:
        for name in ("p2", "p0", "p1"):
            swarm.act(name, is_calm=True)
    assert swarm.decisions[2][0].members == ("p0", "p1")
    del late.offer  # type: ignore[attr-defined]
    swarm.dead = {"p1"}
    for _ in range(20):
        for name in ("p0", "p2"):
            swarm.act(name, is_calm=True)
    assert len(swarm.decisions) > 3


def test_two_of_five_wait_and_say_so() -> None:
    swarm = Swarm(0, 5)
    swarm.dead = {"p2", "p3", "p4"}
    for _ in range(20):
        for name in ("p0", "p1"):
            swarm.act(name, is_calm=True)
    assert not swarm.decisions
    assert swarm.peers["p0"].waiting_for == "3 of the 5 members of the swarm; 2 answer"


def test_a_record_is_what_it_was_after_its_way_and_nonsense_is_refused() -> None:
    proposal = Proposal(2, "p0", ("p0", "p1"), (1.0, 2.0), ("p0", "p1"), ALL, ALL, 3.0, Leases(), (0, "p0"))
    accepted = ((3, "p1"), proposal, "mean")
    record = Record("p0", 7, "", "p0", 1, ("p0",), "d", ALL, 4.0, promised=(3, "p1"), accepted=accepted)
    record = dataclasses.replace(record, prepared=(3, "p1"), proposal=((3, "p1"), proposal))
    record = dataclasses.replace(record, lacking=("p1",), committed=accepted, wants={"p1": "x"})
    assert Record.of_bytes(record.as_bytes()) == record
    fields = json.loads(zlib.decompress(record.as_bytes()))
    too_long = zlib.compress(json.dumps(fields).encode() + b" " * MOST_RECORD)
    of_nobody = [zlib.compress(text) for text in (b"", b"[]", b"{}", b'{"peer": 1}', b"[" * 100_000)]
    for data in (b"", json.dumps(fields).encode(), record.as_bytes()[:-1], too_long, *of_nobody):
        with pytest.raises(ValueError, match="^no record of a peer: (?!no record)"):
            Record.of_bytes(data)
    others: dict[str, list[object]] = {
        "version": ["7", -1, 1 << 70, True, None],
        "round": [None, 1.5],
        "voters": [[], "p0", [1]],
        "offer": [float("nan"), -1.0, 1e31, "4"],
        "wanted": [1e30, 1 << 62],
        "wants": [[], {"p1": 1}],
        "lineage": ["x" * 20_000, 3],
        "blocks": [[0], [0, 1, 2], None],
        "promised": [[1], ["p", 1]],
        "accepted": [[[3, "p1"], [], "mean"], [[3, "p1"], json.loads(json.dumps(proposal)), 3]],
        "committed": [
            [[3, "p1"], json.loads(json.dumps(proposal._replace(**{field: values}))), "mean"]
            for field, values in (("weights", (1.0,)), ("voters", ()))
        ],
    }
    for name, values in others.items():
        for value in values:
            with pytest.raises(ValueError):
                Record.of_fields({**fields, name: value})


def test_a_record_of_a_hundred_peers_is_small() -> None:
    """Each peer gets those of all others each second."""
    names = tuple(f"machine-{uuid.uuid4().hex[:12]}" for _ in range(100))
    leases = [Leases().after_round({}, {}, dict.fromkeys(names, 6400), first << 16) for first in (7, 8)]
    last, proposal = (
        Proposal(number, names[0], names, (800.0,) * 100, names, ALL, ALL, 1e6, lease, (0, names[number]))
        for number, lease in zip((4, 5), leases, strict=True)
    )
    ballot = (0, names[5])
    record = Record(names[0], 7, "", names[0], 4, names, "d" * 64, ALL, 800.0, promised=ballot, prepared=ballot)
    record = dataclasses.replace(record, accepted=(ballot, proposal, "e" * 64), committed=(ballot, last, "f" * 64))
    assert len(dataclasses.replace(record, proposal=(ballot, proposal)).as_bytes()) < 8000


def test_who_reaches_nobody_is_left_out_and_not_all_others() -> None:
    ballot = (0, "p0")
    proposal = Proposal(2, "p0", tuple("abcd"), (1.0,) * 4, tuple("abcd"), ALL, ALL, 4.0, Leases(), ballot)
    cases: list[tuple[dict[str, str], dict[str, str], set[str]]] = [
        ({"d": "abc"}, {}, {"d"}),
        ({"a": "d", "b": "d", "c": "d", "d": "abc"}, {}, {"d"}),
        ({"a": "b"}, {}, {"b"}),
        ({"a": "b", "b": "a", "c": "d"}, {}, {"b", "d"}),
        ({"a": "a"}, {}, {"a"}),
        ({}, {}, set()),
        ({"b": "d", "c": "d"}, {"a": "bc"}, {"d"}),  # They are slow because they wait for it.
        ({}, {"a": "b", "c": "b"}, {"b"}),
    ]
    for lacking, means, lost in cases:
        records = [Record(peer, 1, "", "p0", 1, ("a",), lacking_in=ballot) for peer in "abcd"]
        records = [
            dataclasses.replace(
                each, lacking=tuple(lacking.get(each.peer, "")), lacking_means=tuple(means.get(each.peer, ""))
            )
            for each in records
        ]
        agreement = Agreement(dataclasses.replace(records[0], proposal=(ballot, proposal)))
        for each in records[1:]:
            agreement.hear(each)
        assert agreement._lost() == lost


def test_a_voter_that_lives_and_hears_nothing_does_not_stop_the_others() -> None:
    """It owns the first ballot, and never proposes."""
    swarm = Swarm(1, 3)
    deaf = swarm.peers["p0"].record.promised[1]
    others = [name for name in swarm.peers if name != deaf]
    for late in (0, 1, 2, 2, 2):
        for name in others:
            for other in swarm.peers:
                swarm.peers[name].hear(swarm.peers[other].record)
            if swarm.peers[name].record.offer is None:
                swarm.peers[name].offer(1.0)
            swarm.peers[name].advance(set(swarm.peers) - {name}, late, True, ALL)
    assert swarm.peers[others[0]].present() is not None


def test_each_attempt_may_take_twice_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes longer than the last rounds did was begun anew for ever."""
    now = [100.0]
    monkeypatch.setattr(_pace.time, "monotonic", lambda: now[0])
    agreement = Agreement(Record("p0", 0, "", "p0", 1, ("p0", "p1"), "digest", ALL))
    pace = _pace.Pace(agreement, [1000], 5.0)
    for _ in range(3):
        pace.exchanged(10, 10.0)  # The bound is 20 s.
    for attempt, seconds in ((1, 20), (2, 40), (3, 80)):
        agreement._change(promised=(attempt, "p1"))
        assert pace.late() == 0
        now[0] += seconds - 1
        assert pace.late() == 0
        now[0] += 2
        assert pace.late() == 1
    agreement._change(promised=(4, "p1"))
    assert pace.late() == 0
    agreement._change(promised=(5, "p1"))  # Somebody was gone.
    assert pace.late() == 0
    now[0] += 161
    assert pace.late() == 1


def test_peers_that_catch_up_have_the_link_as_long_as_a_round_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(_pace.time, "monotonic", lambda: now[0])
    agreement = Agreement(Record("p0", 0, "", "p0", 1, ("p0", "p1"), "digest", ALL))
    pace = _pace.Pace(agreement, [1000], 5.0)
    for seconds in (4.0, 90.0, 4.0):  # Somebody was lost in the second one.
        pace.exchanged(1000, seconds)
    agreement.hear(Record("p1", 1, "", "p0", 0, ("p0",), "digest", ALL))
    for number in range(2, 2 + _pace.MOST_RESTS):
        agreement.begin(round=number)
        assert not pace.offers_are_late() and pace.rests_for() == {"p1"}
        now[0] += 3.9
        assert not pace.offers_are_late() and pace.rests_for() == {"p1"}
        now[0] += 0.2
        assert not pace.offers_are_late() and not pace.rests_for()
    agreement.begin(round=agreement.record.round + 1)
    assert not pace.offers_are_late() and not pace.rests_for()  # It has a link of half the others' rate.


def swarm_of(links: dict[str, str]) -> dict[str, Agreement]:
    """Peers that have made a round together, each of which hears those in `links` alone."""
    names = tuple(links)
    return {
        name: Agreement(Record(name, 0, "", "p0", 1, names, "digest 1", ALL, promised=(0, names[1]))) for name in names
    }


def test_who_hears_few_of_many_does_not_divide_the_swarm() -> None:
    """It did, again and again: the others followed it, and no round was made any more."""
    links = {"a": "bcd", "b": "acd", "c": "abd", "d": "abce", "e": "d"}
    peers = swarm_of(links)
    for _ in range(2):
        for name, peer in peers.items():
            peer.say_quorum(set(links[name]))
            for other in links[name]:
                peer.hear(peers[other].record)
    assert not peers["e"].has_quorum({"d"})
    assert all(peer.hears_of_quorum(set(links[name])) for name, peer in peers.items())
    peers["d"].say_quorum({"e"})
    peers["e"].hear(peers["d"].record)
    assert not peers["e"].hears_of_quorum({"d"})  # Now both are cut off.


def test_the_name_of_a_swarm_that_is_divided_again_and_again_has_an_end() -> None:
    peer = swarm_of({"a": "", "b": ""})["a"]
    for number in range(1, 3000):
        before = peer.record
        peer.split()
        assert len(peer.record.lineage) <= 3100 and peer.record.lineage.count("/") == number
        assert precedence(peer.record) < precedence(before)
        Record.of_bytes(peer.record.as_bytes())


@pytest.mark.parametrize(("rounds", "voters"), [("3333", "abcd"), ("3323", "abcd"), ("3331", "abc"), ("3311", "abc")])
def test_who_lacks_rounds_is_no_voter_if_there_are_three_others(rounds: str, voters: str) -> None:
    """Until it had caught up, a round needed all of the others: when one of them was killed, none was made."""
    peers = swarm_of(dict.fromkeys("abcd", ""))
    for peer, number in zip(peers.values(), rounds, strict=True):
        peer.begin(round=int(number), digest=f"digest {number}", voters=tuple("abcd"))
        peer.offer(1.0)
    first = peers["a"]
    for other in "bcd":
        first.hear(peers[other].record)
    first._propose((0, "a"), set("bcd"), ALL)
    assert first.record.proposal is not None
    assert first.record.proposal[1].voters == tuple(voters)


def test_of_two_parts_the_one_with_more_work_goes_on() -> None:
    """Two machines make rounds as often as eight do, or more often."""
    big, small = swarm_of({"a": "", "b": ""}).values()
    for peer, rounds, weight in ((big, 3, 80.0), (small, 4, 20.0)):
        peer.split()
        for number in range(2, 2 + rounds):
            last, lineage, voters = peer.record.committed[1], peer.record.lineage, peer.record.voters
            made = Proposal(
                number, lineage, voters, (weight,), voters, ALL, ALL, last.total + weight, Leases(), (0, "a")
            )
            peer.begin(round=number, digest=f"digest {number}", committed=((0, "a"), made, ""))
    big.hear(small.record)
    small.hear(big.record)
    assert (big.ahead({"b"}), small.ahead({"a"})) == (None, big.record)
    big.begin(round=big.record.round + 1, digest="of no change", committed=big.record.committed)
    assert precedence(big.record) < precedence(small.heard["a"])


def test_who_is_one_round_behind_is_waited_for_as_others_are() -> None:
    """Its bytes came a little later than those of the others, and so it was late in every round."""
    peers = swarm_of({"a": "bc", "b": "ac", "c": "ab"})
    committed = (
        (0, "a"),
        Proposal(2, "p0", ("a", "b"), (1.0, 1.0), ("a", "b", "c"), ALL, ALL, 2.0, Leases(), (0, "a")),
        "",
    )
    for name, other in (("a", "b"), ("b", "a")):
        peers[name].begin(round=2, voters=("a", "b", "c"), digest="digest 2", blocks=ALL, committed=committed)
        peers[name].offer(1.0)
        peers[name].hear(peers["c"].record)
        peers[name].hear(peers[other].record)
    owner = peers[peers["a"].record.promised[1]]
    owner.hear(peers["b" if owner is peers["a"] else "a"].record)
    alive = {"a", "b", "c"} - {owner.record.peer}
    owner.advance(alive, 0, False, ALL)
    assert owner.waiting_for == "changes of c" and owner.present() is None
    owner.advance(alive, 0, True, ALL)
    assert owner.present() is not None


@pytest.mark.parametrize("lacks", ["a state", "rounds", "nothing"])
def test_who_catches_up(lacks: str) -> None:
    peers = swarm_of({"a": "b", "b": "a"})
    peers["a"]._change(round=3)
    peers["b"].want({"a": "state/b/1"} if lacks == "a state" else {})
    peers["b"]._change(round=1 if lacks == "rounds" else 2)
    peers["a"].hear(peers["b"].record)
    assert peers["a"].catching_up() == (set() if lacks == "nothing" else {"b"})


def test_the_next_round_is_put_off_for_a_while_if_a_peer_catches_up() -> None:
    """Rounds that follow each other use all of a slow link: of four machines two were always on their way."""
    peers = swarm_of({"a": "bc", "b": "ac", "c": "ab"})
    peers["a"].offer(1.0)
    peers["b"].offer(1.0)
    for name in ("a", "c"):
        peers["b"].hear(dataclasses.replace(peers[name].record, version=1))
    peers["b"].advance({"a", "c"}, 0, True, ALL, {"c", "d"})
    assert peers["b"].waiting_for == "peers that catch up: c"
    peers["b"].advance({"a", "c"}, 0, True, ALL, {"d"})  # It is gone.
    assert peers["b"].waiting_for == "" and peers["b"].present() is not None


def test_two_peers_with_different_digests_take_one_of_them() -> None:
    peers = swarm_of({"a": "b", "b": "a"})
    peers["b"].record = dataclasses.replace(peers["b"].record, digest="digest 0")
    for name, other in (("a", "b"), ("b", "a")):
        peers[name].hear(peers[other].record)
    assert peers["a"].ahead({"b"}) == peers["b"].record
    assert peers["b"].ahead({"a"}) is None
    assert peers["a"].ahead(set()) is None


def test_two_peers_of_which_one_fails_do_not_try_without_a_pause() -> None:
    """There is no round without it: attempts follow each other as those do that are late."""
    peers = swarm_of({"a": "b", "b": "a"})
    for number in range(100):
        for name, other in (("a", "b"), ("b", "a")):
            peers[name].hear(peers[other].record)
            if peers[name].record.offer is None:
                peers[name].offer(1.0)
            peers[name].advance({other}, 0, True, ALL)
            if name == "a" and number > 10:
                peers["a"].lack("a")
    assert peers["a"].record.promised[0] == 0
