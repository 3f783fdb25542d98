# Runs in: the courier.
"""Bytes by way of HTTP: each peer serves what it has published. For a local network or a VPN; values are not encrypted.

GET /RUN/KEY       If-None-Match: "SHA-256 of the value that is known", Prefer: wait=SECONDS
GET /RUN/peers     the addresses of the peers that this one has heard of, in JSON; before that their HMAC-SHA256
Peer: NAME ADDRESS, Authorization: Bearer TOKEN     in every request
For: NAME          who is asked: another peer may have its address
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import http.client
import http.server
import ipaddress
import json
import random
import socket
import socketserver
import threading
import time
import urllib.parse
from collections import deque
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from accelmgr.outer._transport import FORGET_S, MOST_RECORD, Absent, Refused, is_host_and_port

LOOK_S = 3.0
"""How often a peer asks others which peers they know."""
SILENT_S = 60.0
"""Of peers that have said nothing for so long one at a time is asked."""
CONNECT_S = 5.0
MOST_PEERS = 10_000
EVERYWHERE = ("0.0.0.0", "::")
PIECE_BYTES = 1 << 20
"""The server's timeout is for each piece of this size, so a large value may take long."""


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 128
    owner: Http

    def __init__(self, family: int, place: Any) -> None:
        self.address_family = family
        super().__init__(place, _Handler)

    def server_bind(self) -> None:
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        socketserver.TCPServer.server_bind(self)  # HTTPServer's may wait for a name service, and needs none.

    def handle_error(self, request: Any, client_address: Any) -> None:
        """The peer has gone; there is nobody to tell."""


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 120
    disable_nagle_algorithm = True

    def log_message(self, format: str, *arguments: Any) -> None:
        pass

    def do_GET(self) -> None:
        assert isinstance(self.server, _Server)
        client = self.client_address[0].removeprefix("::ffff:")  # As a server of IPv6 names one of IPv4.
        status, value = self.server.owner.answer(self.path, dict(self.headers.items()), client)
        self.send_response(status)
        self.send_header("Content-Length", str(len(value)))
        self.end_headers()
        for begin in range(0, len(value), PIECE_BYTES):
            self.wfile.write(memoryview(value)[begin : begin + PIECE_BYTES])


def _split(address: str) -> tuple[str, int]:
    if not is_host_and_port(address):
        raise ValueError(f"'{address}' is no address; it must be HOST:PORT")
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _joined(host: str, port: str | int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _served_everywhere(port: int) -> _Server:
    """By IPv6 and IPv4."""
    if socket.has_dualstack_ipv6():
        return _Server(socket.AF_INET6, ("::", port))
    return _Server(socket.AF_INET, ("", port))


def _served_at(address: str) -> _Server:
    """A name of this machine, which others may know by another address, is served at all of them.

    Raises OSError: the address is not of this machine, or not free.
    """
    host, port = _split(address)
    family, *_, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    if not _is_name(host):
        return _Server(family, place)
    with socket.socket(family) as probe:
        probe.bind((place[0], 0, *place[2:]))
    return _served_everywhere(port)


def _is_name(host: str) -> bool:
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(host)
        return False
    return host != "localhost"


class Http:
    """A transport."""

    def __init__(
        self,
        peer: str,
        run: str,
        secret: str,
        seeds: list[str],
        listen: str = "",
        advertise: str = "",
        places: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """seeds: addresses of peers. listen: HOST:PORT to serve at; empty: one of `seeds` if it is of this machine and
        free, else any port. advertise: the address that others are told; empty: the one that they see, and the port.
        places: as places() of the transport before this one.

        Raises OSError: `listen` cannot be served at.
        """
        self._peer, self._run, self._seeds = peer, urllib.parse.quote(run, safe=""), seeds
        self._token = hashlib.sha256(f"reader\n{run}\n{secret}".encode()).hexdigest()
        self._key = hashlib.sha256(f"peers\n{run}\n{secret}".encode()).digest()
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._addresses: dict[str, str] = {}
        self._met: dict[str, float] = {}  # When a peer was last heard, or when another one first named it.
        self._heard: set[str] = set()  # By this peer itself.
        self._former: deque[str] = deque(maxlen=100)  # Addresses of peers that are forgotten: they may come back.
        self._troubles: dict[str, str] = {}  # Of each seed.
        self._asked_at = time.monotonic()  # When another peer has last reached this one, or could not yet.
        self._idle: dict[str, list[http.client.HTTPConnection]] = {}
        for name, place in places.items():
            self._note(name, place)
        self._closing = threading.Event()
        self._server = self._bound(listen, places.get(peer, ""))
        self._server.owner = self
        host, port = self._server.server_address[:2]
        self._address = advertise or _joined("" if host in EVERYWHERE else str(host), port)  # None: others see it.
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True).start()
        threading.Thread(target=self._look, daemon=True).start()

    def _bound(self, listen: str, before: str) -> _Server:
        if listen:
            return _served_at(listen)
        for place in (before, *self._seeds):
            with contextlib.suppress(OSError, ValueError):
                return _served_at(place)
        return _served_everywhere(0)

    # Serving

    def answer(self, path: str, headers: dict[str, str], client: str) -> tuple[int, bytes]:
        """Status and body. Blocks for as long as the request says, at most 60 s."""
        if not hmac.compare_digest(headers.get("Authorization", ""), f"Bearer {self._token}"):
            return 403, b"another run, or another secret"
        name, _, address = headers.get("Peer", "").partition(" ")
        if name and address:
            self._asked_at = self._asked_at if name == self._peer else time.monotonic()
            self._note(name, _joined(client, address[1:]) if address.startswith(":") else address, is_heard=True)
        if headers.get("For", self._peer) != self._peer:
            return 410, b"another peer"
        run, _, key = path.lstrip("/").partition("/")
        if run != self._run:
            return 404, b"another run"
        if key == "peers":
            with self._changed:
                heard = {each: self._addresses[each] for each in self._heard}
            body = json.dumps({self._peer: self._address, **heard}).encode()
            return 200, hmac.digest(self._key, body, "sha256") + body
        known = headers.get("If-None-Match", "")
        with contextlib.suppress(ValueError):
            wait = min(60.0, float(headers.get("Prefer", "").partition("wait=")[2] or 0))
            with self._changed:
                self._changed.wait_for(lambda: self._is_new(key, known) or self._closing.is_set(), wait)
                if self._is_new(key, known):
                    return 200, self._values[key]
        return 404, b"not published"

    def _is_new(self, key: str, known: str) -> bool:
        value = self._values.get(key)
        return value is not None and (not known or known != hashlib.sha256(value).hexdigest())

    def publish(self, key: str, value: bytes | None) -> None:
        with self._changed:
            if value is None:
                self._values.pop(key, None)
            else:
                self._values[key] = value
            self._changed.notify_all()

    # Asking

    def _ask(
        self, address: str, key: str, deadline: float, headers: dict[str, str], most: int | None = None
    ) -> tuple[int, bytes]:
        """most: bytes of the answer's body that are read. Raises OSError or http.client.HTTPException: no answer."""
        given = {"Authorization": f"Bearer {self._token}", "Peer": f"{self._peer} {self._address}", **headers}
        connection = None
        with contextlib.suppress(IndexError):
            connection = self._idle.get(address, []).pop()
        for _ in range(2):
            is_kept = connection is not None
            if connection is None:
                connection = http.client.HTTPConnection(*_split(address), timeout=CONNECT_S)
                connection.connect()
                connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            try:
                if (sock := connection.sock) is None:
                    raise ConnectionError("close() has closed it")
                # What has begun to come may go on for longer, as long as it comes.
                sock.settimeout(max(0.05, deadline - time.monotonic()) + CONNECT_S)
                connection.request("GET", f"/{self._run}/{key}", headers=given)
                response = connection.getresponse()
                body = response.read(most)
                if self._closing.is_set() or connection.sock is None or not response.isclosed():
                    connection.close()  # What answers keeps no connections, or says more.
                else:
                    self._idle.setdefault(address, []).append(connection)
                return response.status, body
            except (ConnectionError, http.client.RemoteDisconnected):
                connection.close()
                if not is_kept:
                    raise
                connection = None  # The peer has closed what was kept.
            except BaseException:
                connection.close()
                raise
        raise ConnectionError

    def fetch(self, key: str, peer: str, deadline: float, known: bytes | None = None) -> bytes:
        while True:
            address = self.places().get(peer)
            if address is None:
                raise Absent(f"the address of {peer} is not known", is_gone=True)
            wait = max(0.0, min(60.0, deadline - time.monotonic()))
            headers = {"Prefer": f"wait={wait:.3f}", "For": peer}
            if known is not None:
                headers["If-None-Match"] = hashlib.sha256(known).hexdigest()
            try:
                most = MOST_RECORD if key == "record" else None
                status, body = self._ask(address, urllib.parse.quote(key), deadline, headers, most)
            except (OSError, http.client.HTTPException) as error:
                raise Absent(f"{peer} at {address} does not answer: {error}", is_gone=True) from error
            if status == 200:
                self._note(peer, address, is_heard=True)
                return body
            if status == 410:
                raise Absent(f"{peer} is no longer at {address}", is_gone=True)
            if status == 403:
                raise Refused(f"{peer} at {address} has another secret or another run")
            if time.monotonic() >= deadline:
                raise Absent(f"{peer} at {address} has not published {key}")

    def _note(self, peer: str, address: str, is_heard: bool = False) -> None:
        """What this peer has heard itself is not replaced by what others say, as long as it is fresh."""
        now = time.monotonic()
        with self._changed:
            is_fresh = peer in self._heard and now - self._met[peer] < SILENT_S
            has_room = peer in self._addresses or len(self._addresses) < MOST_PEERS
            if peer != self._peer and is_host_and_port(address) and has_room and (is_heard or not is_fresh):
                if (before := self._addresses.get(peer)) not in (None, address):
                    self._idle.pop(before, None)
                self._addresses[peer] = address
                self._met[peer] = now if is_heard else self._met.get(peer, now)
                self._heard |= {peer} if is_heard else set()
            for gone in [each for each, met in self._met.items() if now - met > FORGET_S]:
                self._former.append(self._addresses.pop(gone))
                self._idle.pop(self._former[-1], None)
                del self._met[gone]
                self._heard.discard(gone)

    def _look(self) -> None:
        """Asks seeds, peers that answer, and one of those that do not, which peers they know."""
        while not self._closing.is_set():
            with self._changed:
                now = time.monotonic()
                silent = [each for each, met in self._met.items() if now - met > SILENT_S]
                asked = self._addresses.keys() - silent | set(random.sample(silent, min(1, len(silent))))
                addresses = {*self._seeds, *(self._addresses[each] for each in asked)}
                addresses |= set(random.sample(self._former, min(1, len(self._former))))
                if not self._heard.difference(silent):
                    self._asked_at = now
            for address in addresses:
                trouble = "has another run or another secret, or is no peer"
                try:
                    status, body = self._ask(address, "peers", time.monotonic(), {}, MOST_RECORD)
                    if status == 200 and hmac.compare_digest(body[:32], hmac.digest(self._key, body[32:], "sha256")):
                        trouble = ""
                        for name, place in json.loads(body[32:]).items():
                            host = address.rpartition(":")[0]
                            self._note(str(name), f"{host}{place}" if str(place).startswith(":") else str(place))
                except (OSError, ValueError, http.client.HTTPException) as error:
                    trouble = f"does not answer: {error}"
                if address in self._seeds:
                    self._troubles[address] = trouble
            self._closing.wait(LOOK_S if self._addresses else 0.5)

    def address(self) -> str:
        host, port = self._server.server_address[:2]
        seen = socket.gethostname() if host in EVERYWHERE else str(host)
        return _joined(seen, port) if self._address.startswith(":") else self._address

    def peers(self) -> set[str]:
        with self._changed:
            return set(self._addresses)

    def places(self) -> dict[str, str]:
        host, port = self._server.server_address[:2]
        with self._changed:
            return {self._peer: _joined(str(host), port), **self._addresses}

    def trouble(self) -> str:
        now = time.monotonic()
        with self._changed:
            is_alone = all(now - self._met[each] > SILENT_S for each in self._heard)
        if is_alone:
            return "; ".join(f"{address} {why}" for address, why in dict(self._troubles).items() if why)
        is_reached = now - self._asked_at < SILENT_S
        return "" if is_reached else f"no other peer reaches this one at {self.address()} (`listen`, `advertise`)"

    def close(self) -> None:
        self._closing.set()
        with self._changed:
            self._changed.notify_all()
        self._server.shutdown()
        self._server.server_close()
        for connection in [each for idle in self._idle.values() for each in idle]:
            connection.close()
