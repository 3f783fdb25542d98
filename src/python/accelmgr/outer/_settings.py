# Runs in: the host, which writes; the courier, which reads.
"""What a courier is told when it begins, and the transport that it makes of that."""

from __future__ import annotations

import dataclasses
import json
import math

from accelmgr.outer._exchange import digest_of
from accelmgr.outer._folder import Folder
from accelmgr.outer._http import Http
from accelmgr.outer._transport import Sealed, Transport


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
    min_peers: int
    fragment_s: float
    wanted: int
    """See Record."""
    first_round: int
    """After which this peer begins: 0, or that of the state with which it begins."""
    shapes: list[tuple[int, ...]]
    optimizer: bytes
    """A pickled function from outer parameters to their optimizer."""

    @property
    def model(self) -> str:
        """See Record."""
        numbers = sum(math.prod(shape) for shape in self.shapes)
        digest = digest_of(json.dumps(self.shapes).encode())[:8]
        return f"{len(self.shapes)} parameters with {numbers} numbers (shapes {digest}), payload {self.kind}"


def transport_of(settings: Settings, places: dict[str, str]) -> Transport:
    """places: as the transport before this one had them. Raises an error that says why it cannot be used."""
    peer, run, secret = settings.peer, settings.run, settings.secret
    transport: Transport
    if settings.place == "p2p" or "/p2p/" in settings.place:
        from accelmgr.outer._hivemind import Hivemind  # Takes seconds, and hivemind may not be installed.

        seeds = [] if settings.place == "p2p" else settings.place.split(",")
        transport = Hivemind(peer, run, secret, seeds, settings.listen, settings.advertise, places)
    elif "/" in settings.place:
        transport = Folder(settings.place, run, peer)
    else:
        seeds = settings.place.split(",")
        transport = Http(peer, run, secret, seeds, settings.listen, settings.advertise, places)
    return Sealed(transport, peer, run, secret)
