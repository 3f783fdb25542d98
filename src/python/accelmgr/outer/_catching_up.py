# Runs in: the courier.
"""Peers that lack rounds replay them; those that lack too many, or join, take the state of another peer."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import json
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from accelmgr.outer._agreement import Agreement
from accelmgr.outer._exchange import digest_of
from accelmgr.outer._record import Accepted, Record, proposal_of
from accelmgr.outer._state import State
from accelmgr.outer._state import digest_of as digest_of_hashes
from accelmgr.outer._transport import Absent, Transport

LEAST_REPLAYED_BYTES = 64 << 20
ANSWER_S = 10.0
CARRY_S = 120.0
"""The most seconds for which a peer waits for a mean or a block, before it begins to catch up anew."""
AGAIN_S = 0.1
MOST_DONORS = 4
"""Each has a copy of its state in memory while it serves it."""


class CatchingUp:
    """The methods are for the main thread, except where they say otherwise."""

    def __init__(
        self,
        agreement: Agreement,
        state: State,
        transport: Transport,
        *,
        later: Callable[[Callable[[], object]], None],
        commits: Callable[[Accepted, bytes], None],
        takes: Callable[[Record, list[str], dict[int, bytes]], None],
        says: Callable[[str], None],
    ) -> None:
        """later: makes a call in the main thread. commits, takes: called there with a round, or with another state:
        a record, the SHA-256 of all blocks, and those blocks that this peer lacked when it asked."""
        self._agreement, self._state, self._transport = agreement, state, transport
        self._later, self._commits, self._takes, self._says = later, commits, takes, says
        self._thread: threading.Thread | None = None
        self._served: dict[str, set[str]] = {}  # What is published for each state that a peer asks for.
        self._publishing: threading.Thread | None = None  # The last one of those that publish a state.
        self._kept: deque[tuple[int, str, int]] = deque()  # Numbers, keys and sizes of rounds.

    @property
    def is_under_way(self) -> bool:
        return self._thread is not None

    # For others

    def keep(self, decided: Accepted, mean: bytes) -> None:
        """Others can replay this round. As many are kept as have the size of the outer parameters and momentum.

        Raises OSError.
        """
        number, key = decided[1].number, decided[1].key
        self._kept.append((number, key, len(mean)))
        most = max(LEAST_REPLAYED_BYTES, 8 * self._state.count((0, len(self._state.parameters))))
        while len(self._kept) > 1 and sum(size for *_, size in self._kept) > most:
            old, old_key, _ = self._kept.popleft()
            self._transport.publish(f"{old_key}/mean", None)
            self._transport.publish(f"round/{old}", None)
        self._transport.publish(f"{key}/mean", mean)
        self._transport.publish(f"round/{number}", json.dumps(decided).encode())

    def kept_means(self) -> set[str]:
        """The keys of the means that others can replay."""
        return {f"{key}/mean" for _, key, _ in self._kept}

    def serve(self, alive: set[str]) -> None:
        """Publishes the state as it is now for each living peer that asks for it, until it asks no more."""
        own, heard = self._agreement.record.peer, self._agreement.heard
        wanted = {
            heard[peer].wants[own] for peer in alive if heard[peer].wants.get(own, "").startswith(f"state/{peer}/")
        }
        values: dict[str, bytes | None] = {}
        for name in self._served.keys() - wanted:
            keys = self._served.pop(name)
            values |= dict.fromkeys(keys.difference(*self._served.values()))
        for name in wanted - self._served.keys():
            hashes = list(self._state.hashes)
            snapshot = {"hashes": hashes, **dataclasses.asdict(self._agreement.record)}
            # First what the peer waits for; then the blocks, which may take long.
            values[name] = json.dumps(snapshot).encode()
            values |= {f"block/{digest}": self._state.block(index) for index, digest in enumerate(hashes)}
            self._served[name] = {f"block/{digest}" for digest in hashes} | {name}
        if values:
            arguments = values, self._publishing
            self._publishing = threading.Thread(target=self._publish, args=arguments, daemon=True)
            self._publishing.start()

    def _publish(self, values: dict[str, bytes | None], before: threading.Thread | None) -> None:
        """In a thread of its own, after the one before it."""
        if before is not None:
            before.join()
        for key, value in values.items():
            try:
                self._transport.publish(key, value)
            except OSError as error:  # The peer asks again.
                self._says(f"the state cannot be published: {error}")

    # For this peer

    def follow(self, leader: Record, alive: set[str]) -> None:
        """Begins to get what the leader has and this peer lacks, unless that is under way."""
        if self._thread is None:
            heard, place = self._agreement.heard, (leader.lineage, leader.round, leader.digest)
            same = {each for each in alive if (heard[each].lineage, heard[each].round, heard[each].digest) == place}
            others = sorted(same - {leader.peer})
            donors = [leader.peer, *random.sample(others, min(MOST_DONORS - 1, len(others)))]
            arguments = leader, donors, self._agreement.record, list(self._state.hashes)
            self._thread = threading.Thread(target=self._run, args=arguments, daemon=True)
            self._thread.start()

    def _ended(self) -> None:
        self._thread = None
        self._agreement.want({})

    def _run(self, leader: Record, donors: list[str], own: Record, hashes: list[str]) -> None:
        """In a thread of its own, as all below."""
        try:
            lacks_rounds = leader.lineage == own.lineage and leader.round > own.round
            if not (lacks_rounds and self._replay(leader, own)):
                self._fetch_state(donors, own.peer, hashes)
        except Absent:
            time.sleep(AGAIN_S)  # Another peer may be the leader then.
        except (ValueError, TypeError, KeyError) as error:
            self._says(f"the state of {leader.peer} cannot be taken: {error}")
            time.sleep(AGAIN_S)
        finally:
            self._later(self._ended)

    def _replay(self, leader: Record, own: Record) -> bool:
        """Returns False if the leader has no longer the first round that this peer lacks: then it needs the state."""
        for number in range(own.round + 1, leader.round + 1):
            try:
                decided = proposal_of(json.loads(self._fetch(f"round/{number}", leader.peer, 0)))
                mean = self._fetch(f"{decided[1].key}/mean", leader.peer, ANSWER_S)  # It was there first.
            except Absent:
                return number > own.round + 1
            self._later(lambda decided=decided, mean=mean: self._commits(decided, mean))  # type: ignore[misc]
        return True

    def _fetch(self, key: str, peer: str, within_s: float) -> bytes:
        return self._transport.fetch(key, peer, time.monotonic() + within_s)

    def _fetch_state(self, donors: list[str], own: str, hashes: list[str]) -> None:
        """The state of the first donor; the others that have the same one send a part of its blocks."""
        name = f"state/{own}/{time.monotonic_ns()}"  # One that no donor has made before.
        self._later(lambda: self._agreement.want(dict.fromkeys(donors, name)))
        with concurrent.futures.ThreadPoolExecutor(len(donors)) as pool:
            first, *others = [pool.submit(self._fetch, name, donor, ANSWER_S) for donor in donors]
            record, theirs = _parsed(first.result())
            if len(theirs) != len(hashes):
                raise ValueError(f"it has {len(theirs)} parameters, this peer {len(hashes)}")
            if digest_of_hashes(theirs) != record.digest:
                raise ValueError("its digest is another than that of its blocks")
            same = [donors[0]]
            for donor, answer in zip(donors[1:], others, strict=True):
                if answer.exception() is None and _parsed(answer.result())[1] == theirs:
                    same.append(donor)
            lacking = [index for index, digest in enumerate(theirs) if digest != hashes[index]]
            fetched = pool.map(lambda place: self._block(theirs[lacking[place]], same, place), range(len(lacking)))
            blocks = dict(zip(lacking, fetched, strict=True))
        self._later(lambda: self._takes(record, theirs, blocks))

    def _block(self, digest: str, donors: list[str], place: int) -> bytes:
        """From one of the donors, of which those that have gone are taken out."""
        while True:
            left = list(donors)
            if not left:
                raise Absent("all donors have gone", is_gone=True)
            donor = left[place % len(left)]
            try:
                block = self._fetch(f"block/{digest}", donor, CARRY_S)
            except Absent:
                with contextlib.suppress(ValueError):  # Another thread has found it out.
                    donors.remove(donor)
                continue
            if digest_of(block) != digest:
                raise ValueError(f"{donor} has sent other bytes than their SHA-256 says")
            return block


def _parsed(snapshot: bytes) -> tuple[Record, list[str]]:
    """A peer's record and the SHA-256 of each block. Raises ValueError, TypeError or KeyError."""
    data: dict[str, Any] = json.loads(snapshot)
    hashes = [str(each) for each in data.pop("hashes")]
    return Record.of_fields(data), hashes
