# Runs in: the host, which writes; the courier, which reads.
"""What a courier is told when it begins, and the transport that it makes of that."""

from __future__ import annotations

import dataclasses
import json
import math
import re

from accelmgr.errors import ConfigError
from accelmgr.outer._exchange import digest_of
from accelmgr.outer._folder import Folder
from accelmgr.outer._http import Http
from accelmgr.outer._payload import KINDS
from accelmgr.outer._transport import Sealed, Transport, is_host_and_port

FORMS = "RUN@HOST:PORT, RUN@/FOLDER, RUN@p2p or RUN@MULTIADDR/p2p/PEER"
MULTIADDR = re.compile("/(ip4|ip6|dns[a-z0-9]*|p2p)/")


def require(name: str, value: object, is_right: bool, right: str) -> None:
    """Raises ConfigError."""
    if not is_right:
        raise ConfigError(f"{name} is {value!r}; it must be {right}", name)


def is_name(run: str) -> bool:
    """Of a folder, too."""
    return run.strip(".") != "" and "/" not in run


@dataclasses.dataclass(frozen=True)
class Settings:
    """What the host gives its courier: arguments of DiLoCo, and what else is explained here.

    Raises ConfigError for what cannot be.
    """

    peer: str
    swarm: str
    secret: str
    listen: str
    advertise: str
    payload: str
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

    def __post_init__(self) -> None:
        is_swarm = isinstance(self.swarm, str) and is_name(self.run) and (self.is_p2p or self.is_folder or self.is_http)
        require("swarm", self.swarm, is_swarm, f"{FORMS}; RUN is a name without '/'")
        for name, address in (("listen", self.listen), ("advertise", self.advertise)):
            require(name, address, not (self.is_http and address) or is_host_and_port(address), "HOST:PORT")
        require("payload", self.payload, self.payload in KINDS, f"one of {', '.join(KINDS)}")
        require("min_peers", self.min_peers, isinstance(self.min_peers, int) and self.min_peers >= 2, "at least 2")
        require("bound", self.bound, self.bound is None or self.bound > 0, "more than 0")
        require("fragment_s", self.fragment_s, self.fragment_s > 0, "more than 0")

    @property
    def run(self) -> str:
        return self.swarm.partition("@")[0]

    @property
    def place(self) -> str:
        return self.swarm.partition("@")[2]

    @property
    def is_p2p(self) -> bool:
        of_peers = all(MULTIADDR.match(each) and "/p2p/" in each for each in self.place.split(","))
        return self.place == "p2p" or of_peers

    @property
    def is_folder(self) -> bool:
        return self.place.startswith(("/", "./", "../")) and not MULTIADDR.match(self.place)

    @property
    def is_http(self) -> bool:
        return all(is_host_and_port(each) and not each.endswith(":0") for each in self.place.split(","))

    @property
    def model(self) -> str:
        """See Record."""
        numbers = sum(math.prod(shape) for shape in self.shapes)
        digest = digest_of(json.dumps(self.shapes).encode())[:8]
        return f"{len(self.shapes)} parameters with {numbers} numbers (shapes {digest}), payload {self.payload}"


def transport_of(settings: Settings, places: dict[str, str]) -> Transport:
    """places: as the transport before this one had them. Raises an error that says why it cannot be used."""
    peer, run, secret, place = settings.peer, settings.run, settings.secret, settings.place
    transport: Transport
    if settings.is_p2p:
        from accelmgr.outer._hivemind import Hivemind  # Takes seconds, and hivemind may not be installed.

        seeds = [] if place == "p2p" else place.split(",")
        transport = Hivemind(peer, run, secret, seeds, settings.listen, settings.advertise, places)
    elif settings.is_folder:
        transport = Folder(place, run, peer)
    else:
        transport = Http(peer, run, secret, place.split(","), settings.listen, settings.advertise, places)
    return Sealed(transport, peer, run, secret)
