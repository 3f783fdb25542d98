# Runs in: the courier.
"""What other peers say: each one's record is followed in a thread, and tells the agreement when it is new."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from accelmgr.outer._agreement import Agreement
from accelmgr.outer._record import Record
from accelmgr.outer._settings import Settings
from accelmgr.outer._transport import Absent, Refused, Transport

BEAT_S = 1.0
"""The time between two records of a peer that has nothing new to say."""
ANSWER_S = 3.0
"""In which a peer that has just been found says where it stands."""
SILENCE_S = 6.0
"""A peer that has said nothing for so long counts as gone until it speaks again."""
MOST_PAUSE_S = 30.0
"""The longest pause before a peer that does not answer is asked again."""


class Hearing:
    """The public methods are for the main thread."""

    def __init__(
        self,
        settings: Settings,
        agreement: Agreement,
        transport: Transport,
        *,
        later: Callable[[Callable[[], object]], None],
        says: Callable[[str], None],
        has_left: Callable[[], bool],
    ) -> None:
        """later: makes a call in the main thread. has_left: whether the threads are to end."""
        self._settings, self._agreement, self._transport = settings, agreement, transport
        self._later, self._says, self._has_left = later, says, has_left
        self._followed: dict[str, float] = {}  # Since when.
        self._heard_at: dict[str, float] = {}
        self._gone: set[str] = set()

    def follow_peers(self) -> None:
        """Begins to follow those that are new."""
        for peer in self._transport.peers() - self._followed.keys():
            self._followed[peer] = time.monotonic()
            threading.Thread(target=self._hear_peer, args=(peer,), daemon=True).start()

    def _hear_peer(self, peer: str) -> None:
        known: bytes | None = None
        heard_at = time.monotonic()
        try:
            while not self._has_left() and peer in self._transport.peers():
                try:
                    known = self._transport.fetch("record", peer, time.monotonic() + 2 * BEAT_S, known)
                    record, heard_at = Record.of_bytes(known), time.monotonic()
                    self._check(record, peer)
                    self._later(lambda record=record: self._heard(record))  # type: ignore[misc]
                except Absent as absent:
                    if isinstance(absent, Refused):
                        self._says(str(absent))
                    if absent.is_gone:
                        self._later(lambda: self._gone.add(peer))
                    if absent.is_gone or peer not in self.alive():
                        # Before it is asked again: it may come back.
                        time.sleep(min(MOST_PAUSE_S, max(BEAT_S, (time.monotonic() - heard_at) / 10)))
                except ValueError as error:
                    self._says(f"the record of {peer} is left out: {error}")
                    time.sleep(BEAT_S)
        except OSError as error:  # A folder that is away for a moment. follow_peers() begins anew.
            self._says(f"{peer} cannot be heard: {error}")
        finally:
            self._later(lambda: self._forget(peer))

    def _check(self, record: Record, peer: str) -> None:
        """Raises ValueError for a record that is not of this peer, or with which there can be no round."""
        if record.peer != peer:
            raise ValueError(f"it is that of {record.peer}")
        if record.model != self._settings.model:
            raise ValueError(f"it has {record.model}; this peer has {self._settings.model}")
        proposals = [each[1] for each in (record.proposal, record.accepted, record.committed) if each is not None]
        for begin, end in (record.blocks, *(each for made in proposals for each in (made.blocks, made.next_blocks))):
            if not begin < end <= len(self._settings.shapes):
                raise ValueError(f"there are no blocks {begin} to {end}")

    def _forget(self, peer: str) -> None:
        self._agreement.heard.pop(peer, None)
        self._heard_at.pop(peer, None)
        self._gone.discard(peer)
        self._followed.pop(peer, None)

    def _heard(self, record: Record) -> None:
        known = self._agreement.heard.get(record.peer)
        self._agreement.hear(record)
        if known is None or known.version < record.version:
            self._heard_at[record.peer] = time.monotonic()
            self._gone.discard(record.peer)

    def has_heard_all(self) -> bool:
        """Whether each peer has said where it stands, or had the time for it. The first one may lack many rounds."""
        now = time.monotonic()
        silent = self._followed.keys() - self._heard_at.keys() - self._gone
        return all(now - self._followed[peer] > ANSWER_S for peer in silent)

    def alive(self) -> set[str]:
        """Peers that have spoken in the last SILENCE_S. Any thread may call it."""
        now = time.monotonic()
        return {peer for peer, at in dict(self._heard_at).items() if now - at < SILENCE_S} - self._gone
