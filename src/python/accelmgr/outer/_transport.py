# Runs in: the courier.
"""How peers get each other's bytes: what a transport does, and the seal around what it carries."""

from __future__ import annotations

import hashlib
import hmac
import re
from typing import Protocol

FORGET_S = 3600.0
"""A peer that nobody has heard of for so long is forgotten, until it is heard of again."""


def is_host_and_port(address: str) -> bool:
    """An address of IPv6 is in brackets, as in a URL."""
    found = re.fullmatch(r"(\[[^][\s]+\]|[^][:/@\s]+):([0-9]{1,5})", address)
    return found is not None and int(found[2]) < 1 << 16


MOST_RECORD = 1 << 24
"""Bytes of what a peer is asked for first, of which nobody knows yet that it has the secret."""


class Absent(Exception):
    """The peer has not published the key in time. is_gone: it does not answer."""

    def __init__(self, text: str, is_gone: bool = False) -> None:
        super().__init__(text)
        self.is_gone = is_gone


class Refused(Absent):
    """What answers is no peer of this swarm: it has another secret, or serves another run."""

    def __init__(self, text: str) -> None:
        super().__init__(text, is_gone=True)


class Transport(Protocol):
    """Each peer publishes values, which other peers fetch. All methods may be called from any thread."""

    def publish(self, key: str, value: bytes | None) -> None:
        """Others can fetch this value from now on; None: no longer. Raises OSError (a full disk)."""

    def fetch(self, key: str, peer: str, deadline: float, known: bytes | None = None) -> bytes:
        """Returns the value that `peer` has published, as soon as it is there and is not `known`.

        deadline: a time of time.monotonic(). Raises Absent.
        """
        ...

    def address(self) -> str:
        """How other peers name this one in their `swarm`, after RUN@."""
        ...

    def peers(self) -> set[str]:
        """Other peers of which this one has heard in the last FORGET_S; they may be gone."""
        ...

    def places(self) -> dict[str, str]:
        """Where peers are, this one too, for the transport of the courier that takes this one's place."""
        ...

    def trouble(self) -> str:
        """Why this peer hears of no other, or no other of it; empty if neither is so."""
        ...

    def close(self) -> None:
        """Others cannot fetch anything from this peer any more."""


class Sealed:
    """A transport whose values were published by a peer that knows the swarm's secret, under this key, in this run."""

    def __init__(self, transport: Transport, peer: str, run: str, secret: str) -> None:
        self._transport, self._peer = transport, peer
        self._secret = hashlib.sha256(f"{run}\n{secret}".encode()).digest()

    def _seal(self, peer: str, key: str, value: bytes) -> bytes:
        seal = hmac.new(self._secret, f"{peer}\n{key}\n".encode(), "sha256")
        seal.update(value)  # hmac.digest() takes no more than 2 GiB.
        return seal.digest()

    def publish(self, key: str, value: bytes | None) -> None:
        self._transport.publish(key, None if value is None else self._seal(self._peer, key, value) + value)

    def fetch(self, key: str, peer: str, deadline: float, known: bytes | None = None) -> bytes:
        """Raises Absent also for a value that the seal does not fit: such a peer has not published it."""
        sealed = None if known is None else self._seal(peer, key, known) + known
        value = self._transport.fetch(key, peer, deadline, sealed)
        seal, body = value[:32], value[32:]  # The one copy of what may be large.
        if not hmac.compare_digest(seal, self._seal(peer, key, body)):
            raise Refused(f"{key} of {peer} does not have the seal of this run: is its `secret` another?")
        return body

    def address(self) -> str:
        return self._transport.address()

    def peers(self) -> set[str]:
        return self._transport.peers()

    def places(self) -> dict[str, str]:
        return self._transport.places()

    def trouble(self) -> str:
        return self._transport.trouble()

    def close(self) -> None:
        self._transport.close()
