# Runs in: the courier.
"""The courier: a process beside the host, which agrees with other peers on rounds and carries their bytes.

It computes nothing that the host waits for. What it must not forget is in memfds of the host: a courier that takes the
place of a killed one goes on under the same name.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import os
import pickle
import queue
import signal
import socket
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from accelmgr.outer._agreement import Accepted, Agreement, Proposal, Record, accepted_of, precedence
from accelmgr.outer._channel import Channel, Numbers, Status
from accelmgr.outer._exchange import Cancelled, Exchange, decoded, digest_of
from accelmgr.outer._folder import Folder
from accelmgr.outer._http import Http
from accelmgr.outer._state import State
from accelmgr.outer._state import digest_of as digest_of_hashes
from accelmgr.outer.bytes import Absent, Bytes, Sealed

PR_SET_PDEATHSIG = 1
TICK_S = 0.1
BEAT_S = 1.0
SILENCE_S = 6.0
"""A peer that has said nothing for so long counts as gone until it speaks again."""
FIRST_ATTEMPT_S = 120.0
FIRST_OFFERS_S = 30.0
LEAST_REPLAYED_BYTES = 64 << 20
REMEMBERED = 20
"""Rounds whose times say how long the next one may take."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """What the host gives its courier."""

    peer: str
    run: str
    place: str
    secret: str
    listen: str
    advertise: str
    kind: str
    bound: float | None
    min_peers: int | None
    fragment_s: float
    shapes: list[tuple[int, ...]]
    optimizer: bytes
    """A pickled function from outer parameters to their optimizer."""


def transport_of(settings: Settings) -> Bytes:
    """Raises ValueError for a place that is none, OSError if it cannot be used."""
    transport: Bytes
    if "/" in settings.place:
        transport = Folder(os.path.join(settings.place, settings.run), settings.peer)
    else:
        seeds = settings.place.split(",")
        transport = Http(settings.peer, settings.run, settings.secret, seeds, settings.listen, settings.advertise)
    return Sealed(transport, settings.peer, settings.run, settings.secret)


class Times:
    """How long something takes, from the last times that it was done."""

    def __init__(self, first_s: float, least_s: float) -> None:
        self._first_s, self._least_s = first_s, least_s
        self._seconds: deque[float] = deque(maxlen=REMEMBERED)

    def add(self, seconds: float) -> None:
        self._seconds.append(seconds)

    @property
    def bound(self) -> float:
        """The median and four times the median distance from it."""
        if len(self._seconds) < 3:
            return self._first_s
        median = statistics.median(self._seconds)
        spread = statistics.median(abs(each - median) for each in self._seconds)
        return max(self._least_s, 2 * median + 4 * spread)


class Courier:
    """The main thread makes all decisions; others wait for bytes, and put what has come into one queue."""

    def __init__(self, settings: Settings, channel: Channel, numbers: Numbers, state_fd: int) -> None:
        self._settings, self._channel, self._numbers = settings, channel, numbers
        shapes, blocks = settings.shapes, range(len(settings.shapes))
        self._state = State(
            state_fd,
            shapes,
            lambda: [numbers.outer(index).view(shapes[index]) for index in blocks],
            pickle.loads(settings.optimizer),
        )
        self._transport = transport_of(settings)
        if self._state.record is not None:
            record = Record.of_bytes(json.dumps(self._state.record).encode())
        else:
            own, every = settings.peer, (0, len(shapes))
            record = Record(own, 0, own, 0, (own,), self._state.digest, every, promised=(0, own))
        self._agreement = Agreement(record, settings.min_peers)
        self._events: queue.Queue[Callable[[], object]] = queue.Queue()
        self._has_ended = False
        self._said: Record | None = None
        self._followed: set[str] = set()
        self._heard_at: dict[str, float] = {}
        self._gone: set[str] = set()
        self._complained: set[str] = set()
        self._exchange: Exchange | None = None
        self._means: dict[str, bytes] = {}
        self._published: list[Exchange] = []
        self._sync: threading.Thread | None = None
        self._served: dict[str, set[str]] = {}  # What is published for each state that a peer asks for.
        self._replayed: deque[tuple[int, str, int]] = deque()  # Numbers, keys and sizes of rounds.
        self._dirty: dict[int, bool] = {}
        self._merged: list[Any] | None = None
        self._is_merging = False
        self._status = Status()
        self._lost_at = time.monotonic()
        self._attempt_s, self._offer_s = Times(FIRST_ATTEMPT_S, 5.0), Times(FIRST_OFFERS_S, 2.0)
        self._rates: deque[float] = deque(maxlen=REMEMBERED)  # Numbers that a round has carried in a second.
        self._attempt: tuple[Any, float] = (None, 0.0)
        self._offers: tuple[Any, set[str], float] = (None, set(), 0.0)

    # The loop

    def run(self) -> None:
        """Returns when the host has gone."""
        self._thread(self._hear_host)
        beaten = time.monotonic()
        while not self._has_ended:
            with contextlib.suppress(queue.Empty):
                self._events.get(timeout=TICK_S)()
                while True:
                    self._events.get_nowait()()
            if time.monotonic() - beaten > BEAT_S:
                self._agreement.beat()
                beaten = time.monotonic()
            self._follow_peers()
            self._advance()
            self._say()
        self._transport.close()

    def _thread(self, target: Callable[..., None], *arguments: Any) -> threading.Thread:
        thread = threading.Thread(target=target, args=arguments, daemon=True)
        thread.start()
        return thread

    def _warn(self, text: str) -> None:
        """Once for each text. Any thread may call it."""
        if text not in self._complained:
            self._complained.add(text)
            self._events.put(lambda: self._tell(warning=text))

    def _tell(self, **message: Any) -> bool:
        with contextlib.suppress(OSError):
            return self._channel.send(**message)
        return False

    # Other peers

    def _follow_peers(self) -> None:
        for peer in self._transport.peers() - self._followed:
            self._followed.add(peer)
            self._thread(self._hear_peer, peer)

    def _hear_peer(self, peer: str) -> None:
        known: bytes | None = None
        while not self._has_ended:
            try:
                known = self._transport.fetch("record", peer, time.monotonic() + 2 * BEAT_S, known)
                record = Record.of_bytes(known)
                self._events.put(lambda record=record: self._heard(record))  # type: ignore[misc]
            except Absent as absent:
                if absent.is_gone:
                    if "secret" in str(absent):
                        self._warn(str(absent))
                    self._events.put(lambda: self._gone.add(peer))
                    time.sleep(BEAT_S)  # Before it is asked again: it may come back.
            except ValueError as error:
                self._warn(f"the record of {peer} is left out: {error}")

    def _heard(self, record: Record) -> None:
        known = self._agreement.heard.get(record.peer)
        self._agreement.hear(record)
        if known is None or known.version < record.version:
            self._heard_at[record.peer] = time.monotonic()
            self._gone.discard(record.peer)

    def _alive(self) -> set[str]:
        now = time.monotonic()
        return {peer for peer, at in self._heard_at.items() if now - at < SILENCE_S} - self._gone

    # A round

    def _advance(self) -> None:
        alive, agreement = self._alive(), self._agreement
        if (leader := agreement.ahead(alive)) is not None:
            self._follow(leader)
            return
        if (decided := agreement.decided()) is not None:
            self._get_mean(decided[1])
            if (mean := self._means.get(decided[1].key)) is not None:
                self._commit(decided, mean)
            return
        self._split_if_needed(alive)
        agreement.advance(alive, self._is_late(), self._offers_are_late(alive), self._next_blocks())
        if (present := agreement.present()) is not None:
            self._get_mean(present[1])
        self._serve_state()

    def _split_if_needed(self, alive: set[str]) -> None:
        now, least = time.monotonic(), self._settings.min_peers
        if least is None or len(alive) + 1 < least or self._agreement.has_quorum(alive):
            self._lost_at = now
        elif now - self._lost_at > 2 * SILENCE_S:
            self._warn(f"the majority of round {self._agreement.record.round} is gone; {len(alive) + 1} peers go on")
            self._agreement.split()

    def _is_late(self) -> bool:
        attempt = self._agreement.record.round, self._agreement.record.promised, self._agreement.present()
        if attempt != self._attempt[0] or (attempt[1][0] == 0 and attempt[2] is None):
            self._attempt = attempt, time.monotonic()
        return time.monotonic() - self._attempt[1] > self._attempt_s.bound

    def _offers_are_late(self, alive: set[str]) -> bool:
        """Whether those that are missing have taken longer than offers did in the last rounds."""
        mine = self._agreement.record
        there = {
            each.peer
            for each in [mine, *self._agreement.heard.values()]
            if each.offer is not None and (each.lineage, each.round) == (mine.lineage, mine.round)
        }
        now = time.monotonic()
        if (mine.lineage, mine.round) != self._offers[0]:
            self._offers = (mine.lineage, mine.round), set(), 0.0
        _, known, since = self._offers
        if there and not known:
            since = now
        if there - known and known:
            self._offer_s.add(now - since)
        self._offers = self._offers[0], there | known, since
        return bool(there) and now - since > self._offer_s.bound

    def _next_blocks(self) -> tuple[int, int]:
        """Those after the present ones, as many as the last rounds would have carried in `fragment_s`."""
        blocks, sizes = len(self._settings.shapes), [value.numel() for value in self._state.parameters]
        if not self._rates:
            return 0, blocks
        begin = end = self._agreement.record.blocks[1] % blocks
        most = statistics.median(self._rates) * self._settings.fragment_s
        while end < blocks and (end == begin or sum(sizes[begin : end + 1]) <= most):
            end += 1
        return begin, end

    def _get_mean(self, proposal: Proposal) -> None:
        if proposal.key in self._means or (self._exchange and self._exchange.proposal == proposal):
            return
        if self._exchange is not None:
            self._exchange.is_cancelled = True
        own, count = self._settings.peer, self._state.count(proposal.blocks)
        has_offer = self._agreement.record.offer is not None and own in proposal.members
        change = self._numbers.change(proposal.blocks).clone() if has_offer else None
        exchange = Exchange(
            proposal,
            own,
            self._transport,
            self._settings.kind,
            count,
            self._settings.bound,
            holders=lambda: self._agreement.holders(proposal, self._alive()),
            lacks=lambda peer: self._events.put(lambda: self._lacks(proposal, peer)),
            says=self._warn,
        )
        self._exchange = exchange
        self._published.append(exchange)
        self._thread(self._exchanged, exchange, change)

    def _exchanged(self, exchange: Exchange, change: torch.Tensor | None) -> None:
        try:
            mean = exchange.mean(change)
            self._events.put(lambda: self._have_mean(exchange, mean))
        except Cancelled:
            pass
        except Exception as error:  # A full disk. The others go on without this peer.
            self._warn(f"round {exchange.proposal.number} failed here: {error!r}")
            self._events.put(lambda: self._lacks(exchange.proposal, self._settings.peer))

    def _have_mean(self, exchange: Exchange, mean: bytes) -> None:
        if not exchange.is_cancelled:
            self._means[exchange.proposal.key] = mean
            self._agreement.means[exchange.proposal.key] = digest_of(mean)
            self._attempt_s.add(exchange.seconds)
            self._rates.append(self._state.count(exchange.proposal.blocks) / exchange.seconds)

    def _lacks(self, proposal: Proposal, peer: str) -> None:
        present = self._agreement.present()
        if present is not None and present[1] == proposal and proposal.key not in self._means:
            self._agreement.lack(tuple(sorted({*self._agreement.record.lacking, peer})))

    def _commit(self, decided: Accepted, mean: bytes) -> None:
        _, proposal, digest = decided
        if digest_of(mean) != digest:
            self._warn(f"round {proposal.number}: this peer has another mean than a majority; it takes theirs")
            del self._means[proposal.key]
            self._agreement.means.pop(proposal.key, None)
            self._exchange = None
            return
        count = self._state.count(proposal.blocks)

        def record(after: str) -> dict[str, Any]:
            self._agreement.begin(
                round=proposal.number,
                voters=proposal.members,
                digest=after,
                blocks=proposal.next_blocks,
                committed=decided,
            )
            return dataclasses.asdict(self._agreement.record)

        self._state.step(proposal.blocks, decoded(mean, proposal, count, self._settings.kind), record)
        took_part = self._settings.peer in proposal.members
        self._dirty.update(dict.fromkeys(range(*proposal.blocks), took_part))
        self._begin_round()
        self._remember(decided, mean)

    def _begin_round(self) -> None:
        for exchange in self._published:
            exchange.forget()
        self._published.clear()
        self._exchange = None
        self._means.clear()

    # Peers that are ahead, and behind

    def _remember(self, decided: Accepted, mean: bytes) -> None:
        """Others can replay this round. As many are kept as have the size of the outer parameters and momentum."""
        number, key = decided[1].number, decided[1].key
        self._transport.publish(f"{key}/mean", mean)
        self._transport.publish(f"round/{number}", json.dumps(decided, default=dataclasses.asdict).encode())
        self._replayed.append((number, key, len(mean)))
        most = max(LEAST_REPLAYED_BYTES, 8 * sum(value.numel() for value in self._state.parameters))
        while len(self._replayed) > 1 and sum(size for *_, size in self._replayed) > most:
            number, key, _ = self._replayed.popleft()
            self._transport.publish(f"{key}/mean", None)
            self._transport.publish(f"round/{number}", None)

    def _serve_state(self) -> None:
        """Publishes the state as it is now for each peer that asks for it, until it asks no more."""
        records = self._agreement.heard.values()
        wanted = {name for each in records for name in each.wants.get(self._settings.peer, [])}
        for name in wanted - self._served.keys():
            hashes = list(self._state.hashes)
            snapshot = {"hashes": hashes, **dataclasses.asdict(self._agreement.record)}
            self._served[name] = {f"block/{digest}" for digest in hashes} | {name}
            for index, digest in enumerate(hashes):
                self._transport.publish(f"block/{digest}", self._state.block(index))
            self._transport.publish(name, json.dumps(snapshot).encode())
        for name in self._served.keys() - wanted:
            keys = self._served.pop(name)
            for key in keys - {key for others in self._served.values() for key in others}:
                self._transport.publish(key, None)

    def _follow(self, leader: Record) -> None:
        """Replays the rounds that this peer lacks, or takes the state of the peer that is ahead."""
        self._agreement.waiting_for = f"the rounds of {leader.peer}, which has made {leader.round}"
        if self._sync is None:
            self._sync = self._thread(self._catch_up, leader, self._agreement.record, list(self._state.hashes))

    def _catch_up(self, leader: Record, own: Record, hashes: list[str]) -> None:
        try:
            if leader.lineage != own.lineage or not self._replay(leader, own):
                self._fetch_state(leader.peer, hashes)
        except (Absent, ValueError, TypeError, KeyError) as error:
            if not isinstance(error, Absent):
                self._warn(f"the state of {leader.peer} cannot be taken: {error}")
            time.sleep(TICK_S)
        finally:
            self._events.put(self._end_sync)

    def _replay(self, leader: Record, own: Record) -> bool:
        """Returns whether the leader still has the next round."""
        for number in range(own.round + 1, leader.round + 1):
            try:
                data = self._transport.fetch(f"round/{number}", leader.peer, time.monotonic())
                decided = accepted_of(json.loads(data))
                deadline = time.monotonic() + FIRST_ATTEMPT_S
                mean = self._transport.fetch(f"{decided[1].key}/mean", leader.peer, deadline)
            except Absent:
                return number > own.round + 1
            self._events.put(lambda decided=decided, mean=mean: self._replayed_round(decided, mean))  # type: ignore[misc]
        return True

    def _replayed_round(self, decided: Accepted, mean: bytes) -> None:
        record = self._agreement.record
        if (decided[1].lineage, decided[1].number) == (record.lineage, record.round + 1):
            self._commit(decided, mean)

    def _fetch_state(self, donor: str, own: list[str]) -> None:
        name = f"state/{self._settings.peer}/{time.monotonic_ns()}"  # One that the donor has not made before.
        self._events.put(lambda: self._agreement.want({donor: [name]}))
        data = json.loads(self._transport.fetch(name, donor, time.monotonic() + 10 * BEAT_S))
        hashes = [str(each) for each in data.pop("hashes")]
        record = Record.of_bytes(json.dumps(data).encode())
        if len(hashes) != len(own):
            raise ValueError(f"it has {len(hashes)} parameters, this peer {len(own)}")
        if digest_of_hashes(hashes) != record.digest:
            raise ValueError("its digest is another than that of its blocks")
        blocks = {}
        for index, digest in enumerate(hashes):
            if digest != own[index]:
                deadline = time.monotonic() + FIRST_ATTEMPT_S
                blocks[index] = self._transport.fetch(f"block/{digest}", donor, deadline)
                if digest_of(blocks[index]) != digest:
                    raise ValueError(f"parameter {index} has other bytes than its SHA-256 says")
        self._events.put(lambda: self._have_state(record, blocks))

    def _end_sync(self) -> None:
        self._sync = None
        self._agreement.want({})

    def _have_state(self, donor: Record, blocks: dict[int, bytes]) -> None:
        def record(after: str) -> dict[str, Any]:
            fields = ("lineage", "round", "voters", "blocks", "committed")
            self._agreement.begin(digest=after, **{name: getattr(donor, name) for name in fields})
            return dataclasses.asdict(self._agreement.record)

        if precedence(donor) >= precedence(self._agreement.record):
            return  # This peer has got on meanwhile.
        try:
            self._state.take(blocks, record)
            self._dirty.update(dict.fromkeys(blocks, False))
            self._begin_round()
        except ValueError as error:
            self._warn(f"the state of {donor.peer} cannot be taken: {error}")

    # The host

    def _hear_host(self) -> None:
        while True:
            try:
                message = self._channel.receive(may_wait=True)
            except (EOFError, OSError):
                self._has_ended = True
                self._events.put(lambda: None)
                return
            self._events.put(lambda message=message: self._told(message or {}))  # type: ignore[misc]

    def _told(self, message: dict[str, Any]) -> None:
        record = self._agreement.record
        if "merged" in message:
            self._merged, self._is_merging = message["merged"], False
            if message.get("is_first") and self._merged != [record.lineage, record.round]:
                is_next = self._merged == [record.lineage, record.round - 1] and record.committed is not None
                members = record.committed[1].members if record.committed is not None and is_next else ()
                self._dirty = dict.fromkeys(range(len(self._settings.shapes)), record.peer in members)
        if "offer" in message and message["offer"] == [record.lineage, record.round] and record.offer is None:
            if torch.isfinite(self._numbers.change(record.blocks)).all():
                self._agreement.offer(float(message["weight"]))
            else:
                self._warn(f"the change of this peer is not finite; round {record.round + 1} goes without it")

    def _say(self) -> None:
        """Tells peers and host what is new. What others are told is kept before."""
        record = self._agreement.record
        if record != self._said:
            if self._said is None or dataclasses.replace(self._said, version=record.version) != record:
                self._state.keep(dataclasses.asdict(record))
            try:
                self._transport.publish("record", record.as_bytes())
                self._said = record
            except OSError as error:
                self._warn(f"nothing can be published: {error}")
        stands = [record.lineage, record.round]
        if self._dirty and not self._is_merging:
            for index in self._dirty:
                self._numbers.outer(index).copy_(self._state.parameters[index].flatten())
            self._is_merging = self._tell(merge=sorted(self._dirty.items()), stands=stands)
            if self._is_merging:
                self._dirty = {}
        elif self._merged != stands and not self._is_merging:
            self._is_merging = self._tell(merge=[], stands=stands)
        participants = len(record.committed[1].members) if record.committed is not None else 0
        is_ready = self._sync is None and self._agreement.ahead(self._alive()) is None
        status = Status(
            record.lineage,
            record.round,
            participants,
            record.digest,
            self._agreement.waiting_for,
            record.blocks,
            is_ready,
        )
        if status != self._status and self._tell(status=dataclasses.asdict(status)):
            self._status = status


def main(arguments: list[str]) -> None:
    """arguments: the host's pid, and descriptors: settings, socket, numbers, state."""
    host, settings_fd, socket_fd, numbers_fd, state_fd = map(int, arguments)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != host:
        return
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)  # They are for the host, whose end is this process's.
    torch.set_num_threads(1)
    with open(f"/proc/self/fd/{settings_fd}", "rb") as file:
        settings: Settings = pickle.load(file)
    sizes = [torch.Size(shape).numel() for shape in settings.shapes]
    channel = Channel(socket.socket(fileno=socket_fd))
    Courier(settings, channel, Numbers(numbers_fd, sizes), state_fd).run()
    os._exit(0)  # Threads may wait for other peers.
