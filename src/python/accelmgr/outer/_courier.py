# Runs in: the courier.
"""The courier: a process beside the host, which agrees with other peers on rounds and carries their bytes.

It computes nothing that the host waits for. What it must not forget is in memfds of the host: a courier that takes the
place of a killed one goes on under the same name.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import pickle
import queue
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch

from accelmgr.errors import ConfigError
from accelmgr.outer._agreement import Agreement, precedence
from accelmgr.outer._catching_up import CARRY_S, CatchingUp
from accelmgr.outer._channel import Channel, Given, Numbers, Status
from accelmgr.outer._elements import Elements
from accelmgr.outer._exchange import Cancelled, Exchange, decoded, digest_of
from accelmgr.outer._hearing import BEAT_S, Hearing
from accelmgr.outer._leases import FIRST, Leases
from accelmgr.outer._merges import Merges
from accelmgr.outer._pace import Pace
from accelmgr.outer._payload import are_finite
from accelmgr.outer._record import Accepted, Proposal, Record, beginning
from accelmgr.outer._settings import Settings, transport_of
from accelmgr.outer._state import State

PR_SET_PDEATHSIG = 1
TICK_S = 0.1
GO_ON_S = 30.0
"""After so long without a majority those that are there go on by themselves."""
LEAVE_S = 1.0
"""For so long a peer that leaves waits for those that are about to commit the round that it has just committed."""
MOST_TEXT = 500
MOST_WARNINGS = 1000
"""So many texts are remembered, each of which is not said again."""
MOST_PUBLISHED = 3
"""What this peer has published for so many proposals of one round stays: others may still fetch it."""


class Courier:
    """The main thread makes all decisions; others wait for bytes, and put what has come into one queue."""

    def __init__(self, settings: Settings, channel: Channel, numbers: Numbers, given: Given, state_fd: int) -> None:
        self._settings, self._channel, self._numbers = settings, channel, numbers
        shapes, blocks = settings.shapes, range(len(settings.shapes))
        self._state = State(
            state_fd,
            shapes,
            lambda: [numbers.outer(index).view(shapes[index]) for index in blocks],
            pickle.loads(settings.optimizer),
        )
        self._transport = transport_of(settings, self._state.places)
        if self._state.record is not None:
            record = Record.of_fields(self._state.record)
        else:
            own, every = settings.peer, (0, len(shapes))
            leases = Leases().after_round({}, {}, {own: settings.wanted}, FIRST)
            record = dataclasses.replace(beginning(own, leases, every, blocks=every), digest=self._state.digest)
        # The courier before this one has published more versions than it kept; the clock is ahead of them all.
        record = dataclasses.replace(
            record, version=time.monotonic_ns(), model=settings.model, wants={}, wanted=settings.wanted
        )
        self._agreement = Agreement(record, settings.min_peers)
        self._events: queue.Queue[Callable[[], object]] = queue.Queue()
        self._has_ended = self._has_left = False
        self._said: Record | None = None
        self._complained: set[str] = set()
        self._exchange: Exchange | None = None
        self._means: dict[str, bytes] = {}
        self._published: list[Exchange] = []
        self._hearing = Hearing(
            settings,
            self._agreement,
            self._transport,
            later=self._events.put,
            says=self._warn,
            has_left=lambda: self._has_left,
        )
        self._catching_up = CatchingUp(
            self._agreement,
            self._state,
            self._transport,
            later=self._events.put,
            commits=self._replayed,
            takes=self._take,
            says=self._warn,
        )
        self._elements = Elements(self._agreement, given)
        self._merges = Merges(numbers, self._state.parameters, [settings.peer, settings.first_round])
        self._best: Record | None = None  # Of all peers that were ahead, the one to follow.
        self._status = Status()
        self._lost_at = time.monotonic()
        sizes = [value.numel() for value in self._state.parameters]
        self._pace = Pace(self._agreement, sizes, settings.fragment_s)
        self._decided = ("", 0.0)  # The key of a round whose mean is awaited, and since when.

    # The loop

    def run(self) -> None:
        """Returns when the host has gone."""
        self._thread(self._hear_host)
        self._have_accepted()
        beaten = time.monotonic()
        while not self._has_ended:
            self._make_calls()
            if time.monotonic() - beaten > BEAT_S:
                self._agreement.beat()
                self._tell(beat=True)
                beaten = time.monotonic()
            try:
                self._hearing.follow_peers()
                self._advance()
                self._give()
                self._say()
            except OSError as error:  # A full disk: what is missing is published once there is room.
                self._warn(f"nothing can be published or heard: {error}")
        until = time.monotonic() + LEAVE_S
        while self._agreement.is_one_ahead(self._hearing.alive()) and time.monotonic() < until:
            self._make_calls()  # If this peer's word was the one that decided the round, nobody else can tell them.
        self._has_left = True
        self._transport.close()

    def _make_calls(self) -> None:
        """Those that are waiting, and those of the next TICK_S if there are none."""
        with contextlib.suppress(queue.Empty):
            self._events.get(timeout=TICK_S)()
            while True:
                self._events.get_nowait()()

    @staticmethod
    def _thread(target: Callable[..., None], *arguments: Any) -> None:
        threading.Thread(target=target, args=arguments, daemon=True).start()

    def _warn(self, text: str) -> None:
        """Once for each text. Any thread may call it."""
        text = text[:MOST_TEXT]
        if text not in self._complained:
            self._complained = {*self._complained, text} if len(self._complained) < MOST_WARNINGS else {text}
            self._events.put(lambda: self._tell(warning=text))

    def _tell(self, **message: Any) -> bool:
        with contextlib.suppress(OSError):
            return self._channel.send(**message)
        return False

    # A round

    def _advance(self) -> None:
        alive, agreement = self._hearing.alive(), self._agreement
        self._catching_up.serve(alive)
        for peer in agreement.differing():
            self._warn(f"after round {agreement.record.round} {peer} has another digest than this peer")
        if (leader := agreement.ahead(alive)) is not None:
            self._best = min(leader, self._best or leader, key=precedence)
            agreement.waiting_for = f"the state of {leader.peer} after round {leader.round}"
            if self._hearing.has_heard_all():
                self._catching_up.follow(leader, alive)
            return
        self._split_if_needed(alive)
        if (decided := agreement.decided()) is not None:
            self._get_decided(decided, alive)
            return
        pace = self._pace
        if (late := pace.late()) and self._exchange is not None:
            for peer in list(self._exchange.missing):
                self._lacks(self._exchange.proposal, peer, self._exchange.has_changes)
        agreement.advance(alive, late, pace.offers_are_late(), pace.next_blocks(), pace.rests_for())
        if (present := agreement.present()) is not None:
            self._get_mean(present[1])

    def _get_decided(self, decided: Accepted, alive: set[str]) -> None:
        """Commits it once its mean is here. If nobody has the mean any more, who has committed it has the state."""
        agreement, key = self._agreement, decided[1].key
        self._get_mean(decided[1])
        if (mean := self._means.get(key)) is not None:
            self._commit(decided, mean)
            self._say_what_is_lost()
            return
        agreement.waiting_for = f"the mean of round {decided[1].number}"
        if self._decided[0] != key:
            self._decided = key, time.monotonic()
        ahead = [each for each in agreement.committed_next() if each.peer in alive]
        if ahead and time.monotonic() - self._decided[1] > CARRY_S:
            self._catching_up.follow(ahead[0], alive)

    def _say_what_is_lost(self) -> None:
        """A round was made without the state of a peer that was ahead: nobody who answers has it any more."""
        own, best = self._agreement.record, self._best
        if best is not None and best.lineage != own.lineage and precedence(best) < precedence(own):
            state = f"the state of {best.peer} after round {best.round}"
            self._warn(f"nobody who answers has {state} any more; the swarm goes on without it, with round {own.round}")
            self._best = None

    def _split_if_needed(self, alive: set[str]) -> None:
        now, agreement = time.monotonic(), self._agreement
        agreement.say_quorum(alive)
        if len(alive) + 1 < self._settings.min_peers or agreement.hears_of_quorum(alive):
            self._lost_at = now
        elif now - self._lost_at > GO_ON_S:
            self._warn(f"the majority of round {self._agreement.record.round} is gone; {len(alive) + 1} peers go on")
            self._agreement.split()

    def _get_mean(self, proposal: Proposal) -> None:
        if proposal.key in self._means or (self._exchange and self._exchange.proposal == proposal):
            return
        if self._exchange is not None:
            self._exchange.is_cancelled = True
        for old in self._published[:-MOST_PUBLISHED]:
            self._published.remove(old)
            if all(each.proposal != old.proposal for each in self._published):
                self._forget(old)
        has_offer = self._agreement.record.offer is not None and self._settings.peer in proposal.members
        change = self._numbers.change(proposal.blocks).clone() if has_offer else None
        exchange = self._exchange_of(proposal)
        self._thread(self._exchanged, exchange, change)

    def _exchange_of(self, proposal: Proposal) -> Exchange:
        exchange = Exchange(
            proposal,
            self._settings.peer,
            self._transport,
            self._settings.payload,
            self._state.count(proposal.blocks),
            self._settings.bound,
            holders=lambda: self._agreement.holders(proposal, self._hearing.alive()),
            lacks=lambda peer: self._events.put(lambda: self._lacks(proposal, peer)),
            says=self._warn,
            is_late=lambda: self._events.put(lambda: self._forget(exchange)),
        )
        self._exchange = exchange
        self._published.append(exchange)
        return exchange

    def _exchanged(self, exchange: Exchange, change: torch.Tensor | None) -> None:
        try:
            mean = exchange.mean(change)
            self._events.put(lambda: self._have_mean(exchange, mean))
        except Cancelled:
            pass
        except Exception as error:  # A full disk. The others go on without this peer.
            self._warn(f"round {exchange.proposal.number} failed here: {error!r}")
            self._events.put(lambda: self._failed(exchange))

    def _have_accepted(self) -> None:
        """The courier before this one may have accepted a mean that nobody else has."""
        accepted, mean = self._agreement.record.accepted, self._state.mean()
        if accepted is not None and digest_of(mean) == accepted[2]:
            exchange = self._exchange_of(accepted[1])
            self._thread(self._have_again, exchange, mean)

    def _have_again(self, exchange: Exchange, mean: bytes) -> None:
        with contextlib.suppress(OSError, Cancelled):  # The others may have it.
            exchange.publish_mean(mean)
        self._events.put(lambda: self._have_mean(exchange, mean))

    def _failed(self, exchange: Exchange) -> None:
        self._lacks(exchange.proposal, self._settings.peer)
        if self._exchange is exchange:
            self._exchange = None  # It is tried again if the others have decided this round.

    def _have_mean(self, exchange: Exchange, mean: bytes) -> None:
        if exchange.is_cancelled:
            return
        try:
            self._state.keep_mean(mean)
        except OSError as error:  # Full memory. It may not be accepted then.
            self._warn(f"the mean of round {exchange.proposal.number} cannot be kept: {error}")
            self._failed(exchange)
            return
        self._means[exchange.proposal.key] = mean
        self._agreement.means[exchange.proposal.key] = digest_of(mean)
        if exchange.seconds > 0:
            self._pace.exchanged(self._state.count(exchange.proposal.blocks), exchange.seconds)

    def _lacks(self, proposal: Proposal, peer: str, of_mean: bool = False) -> None:
        present = self._agreement.present()
        if present is not None and present[1] == proposal and proposal.key not in self._means:
            self._agreement.lack(peer, of_mean)

    def _commit(self, decided: Accepted, mean: bytes) -> None:
        _, proposal, digest = decided
        if digest_of(mean) != digest:
            self._warn(f"round {proposal.number}: this peer has another mean than a majority; it takes theirs")
            self._means.pop(proposal.key, None)
            self._agreement.means.pop(proposal.key, None)
            self._exchange = None
            return
        count = self._state.count(proposal.blocks)

        def record(after: str) -> dict[str, Any]:
            self._agreement.begin(
                round=proposal.number,
                voters=proposal.voters,
                digest=after,
                blocks=proposal.next_blocks,
                committed=decided,
            )
            return dataclasses.asdict(self._agreement.record)

        try:
            self._state.step(proposal.blocks, decoded(mean, proposal, count, self._settings.payload), record)
        except ConfigError as error:
            self._tell(broke=[proposal.number, str(error)[:MOST_TEXT]])
            raise
        self._merges.add_round(proposal, self._settings.peer)
        self._begin_round()
        try:
            self._catching_up.keep(decided, mean)
        except OSError as error:  # Who needs this round takes the state.
            self._warn(f"round {proposal.number} cannot be kept for others: {error}")

    def _begin_round(self) -> None:
        for exchange in self._published:
            self._forget(exchange)
        self._published.clear()
        self._exchange = None
        self._means.clear()

    def _forget(self, exchange: Exchange) -> None:
        exchange.forget(self._catching_up.kept_means())

    # Other peers' rounds and state

    def _replayed(self, decided: Accepted, mean: bytes) -> None:
        record = self._agreement.record
        if (decided[1].lineage, decided[1].number) == (record.lineage, record.round + 1):
            self._commit(decided, mean)

    def _take(self, donor: Record, hashes: list[str], blocks: dict[int, bytes]) -> None:
        """hashes: of all blocks of the donor. blocks: those that this peer lacks."""
        own = self._agreement.record
        is_here = (donor.lineage, donor.round) == (own.lineage, own.round)
        if precedence(donor) > precedence(own) or (is_here and donor.digest == own.digest):
            return  # This peer has got on meanwhile.
        if any(self._state.hashes[index] != each for index, each in enumerate(hashes) if index not in blocks):
            return  # Likewise: it lacks others now.

        def record(after: str) -> dict[str, Any]:
            fields = {name: getattr(donor, name) for name in ("lineage", "round", "voters", "blocks", "committed")}
            if is_here:  # It has said these, and never takes them back.
                fields |= {name: getattr(own, name) for name in ("promised", "accepted", "prepared", "proposal")}
            self._agreement.begin(digest=after, **fields)
            return dataclasses.asdict(self._agreement.record)

        try:
            self._state.take(blocks, record)
            if donor.lineage != own.lineage and any(own.committed[1].weights):  # It has made a round.
                place = f"{donor.peer} after round {donor.round}"
                self._warn(f"the swarm was divided; this peer, after round {own.round} of its part, goes on as {place}")
            self._merges.add_taken(blocks, own)
            self._begin_round()
            if is_here and own.offer is not None:
                self._offer_nothing()  # The host offers one change in a round.
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
            if record.offer is None:
                self._elements.drop(message["used"])
            self._merges.have(message["merged"], record, bool(message.get("is_first")))
        if "offer" in message and message["offer"] == [record.lineage, record.round] and record.offer is None:
            self._offer(float(message["weight"]), message["since"], message["used"])

    def _offer(self, weight: float, since: int, used: int) -> None:
        """since, used: how many elements the host had used when it began the change, and at its end."""
        why, round_number = "", self._agreement.record.round + 1
        self._elements.begin_change(since)
        if not are_finite(self._numbers.change(self._agreement.record.blocks)):
            why = "is not finite"
        elif self._elements.are_of_others(since, used):
            why = "has elements that were leased to others while this peer was gone"
        if why:
            self._warn(f"the change of this peer {why}; round {round_number} goes without it")
            self._elements.drop(used)
            self._offer_nothing()
        else:
            self._elements.drop(since)
            self._agreement.offer(weight, self._elements.count(since, used))

    def _offer_nothing(self) -> None:
        """So that others need not wait for a change."""
        self._numbers.change((0, len(self._settings.shapes))).zero_()
        self._agreement.offer(0.0)

    def _give(self) -> None:
        """Elements to the host; if it has none, a round is made for it without a change."""
        self._elements.give()
        if self._settings.wanted > 0 and not self._elements.held and self._agreement.record.offer is None:
            self._offer_nothing()

    def _say(self) -> None:
        """Tells host and peers what is new. What others are told is kept before. Raises OSError."""
        record = self._agreement.record
        if (places := self._transport.places()) != self._state.places or self._has_news(record):
            self._state.places = places
            self._state.keep(dataclasses.asdict(record))
        self._tell_host(record)
        if record != self._said:
            self._transport.publish("record", record.as_bytes())
            self._said = record

    def _has_news(self, record: Record) -> bool:
        return self._said is None or dataclasses.replace(self._said, version=record.version) != record

    def _tell_host(self, record: Record) -> None:
        self._merges.send(record, self._tell)
        alive = self._hearing.alive()
        waiting_for = self._agreement.waiting_for
        if trouble := self._transport.trouble():
            waiting_for = f"{waiting_for}; {trouble}" if waiting_for else trouble
            self._warn(trouble)
        status = Status(
            record.lineage,
            record.round,
            sum(weight > 0 for weight in record.committed[1].weights),
            record.committed[1].total,
            record.digest,
            waiting_for[:MOST_TEXT],
            record.blocks,
            not self._catching_up.is_under_way and self._agreement.ahead(alive) is None,
            self._agreement.is_awaited(alive),
            self._transport.address(),
        )
        if status != self._status and self._tell(status=dataclasses.asdict(status)):
            self._status = status


def main(arguments: list[str]) -> None:
    """arguments: the host's pid, and descriptors: settings, socket, numbers, given elements, state."""
    host, settings_fd, socket_fd, numbers_fd, given_fd, state_fd = map(int, arguments)
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
    try:
        courier = Courier(settings, channel, Numbers(numbers_fd, sizes), Given(given_fd), state_fd)
    except Exception as error:  # Another courier would fail in the same way.
        channel.send(failed=f"{type(error).__name__}: {error}")
        return
    code = 1
    try:
        courier.run()
        code = 0
    except Exception:  # The host begins another one.
        traceback.print_exc()
    os._exit(code)  # Threads may wait for other peers.
