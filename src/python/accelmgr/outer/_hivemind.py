# Runs in: the courier.
"""Bytes by way of hivemind's network, which reaches peers behind routers too, and encrypts.

Each peer runs a program of libp2p, p2pd, and is a node of a table that hivemind spreads over all of them. There it says
under the run's name where it is, and says so again before that expires. Values are not in the table: who wants one asks
its peer for one piece after the other, because a message may have 4 MiB at most. Two peers behind routers, which cannot
connect, ask by way of one that both have connected to: libp2p's own relays carry 128 KiB and no more.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import hashlib
import hmac
import os
import random
import signal
import threading
import time
import traceback
from typing import Any

os.environ.setdefault("HIVEMIND_LOGLEVEL", "ERROR")
try:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
    from google.protobuf.wrappers_pb2 import BytesValue
    from hivemind.dht.node import DHTNode
    from hivemind.dht.validation import DHTRecord, RecordValidatorBase
    from hivemind.p2p import P2P, P2PContext, P2PDaemonError, P2PHandlerError, PeerID
    from hivemind.utils import MSGPackSerializer
    from hivemind.utils.multiaddr import Multiaddr
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f"{error}; a swarm over p2p needs it: pip install 'accelmgr[hivemind]'") from error

# isort: split
from accelmgr.outer._transport import FORGET_S, MOST_RECORD, Absent, Refused

PR_SET_PDEATHSIG = 1
LOOK_S = 3.0
"""How often a peer says where it is, and looks where others are."""
ANSWER_S = 10.0
PIECE = 1 << 20
"""So many bytes of a value must come within ANSWER_S."""
MOST_WAYS = 4
"""So many other peers are asked for a value of a peer to which there is no connection."""
HANDLER = "accelmgr.outer"


class _Loop(asyncio.SelectorEventLoop):
    async def subprocess_exec(self, *arguments: Any, **options: Any) -> Any:
        """What it starts ends with this process, however that ends."""
        prctl = ctypes.CDLL(None).prctl
        options["preexec_fn"] = lambda: prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        return await super().subprocess_exec(*arguments, **options)


def _id_of(address: str) -> PeerID:
    return PeerID.from_base58(address.rpartition("/p2p/")[2])


class _NoWay(Absent):
    """Who was asked to ask another peer has no connection to it."""


class _Signed(RecordValidatorBase):  # type: ignore[misc]
    """Only peers that have the secret can write into the table."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def _seal(self, record: DHTRecord, value: bytes) -> bytes:
        signed = MSGPackSerializer.dumps([record.key, record.subkey, value, record.expiration_time])
        return hmac.digest(self._secret, signed, "sha256")

    def validate(self, record: DHTRecord) -> bool:
        return hmac.compare_digest(record.value[-32:], self._seal(record, record.value[:-32]))

    def sign_value(self, record: DHTRecord) -> bytes:
        return bytes(record.value) + self._seal(record, record.value)

    def strip_value(self, record: DHTRecord) -> bytes:
        return bytes(record.value[:-32])


class Hivemind:
    """A transport. A thread has its event loop, in which all coroutines run."""

    def __init__(
        self, peer: str, run: str, secret: str, seeds: list[str], listen: str, advertise: str, places: dict[str, str]
    ) -> None:
        """seeds: multiaddrs of peers; none: this one is the first. listen, advertise: multiaddrs, separated by commas,
        or empty. places: as places() of the transport before this one.

        Raises P2PDaemonError: p2pd cannot start, for instance because `listen` is no address of this machine.
        """
        self._peer, self._table_key, self._places = peer, f"{HANDLER} {run}", dict(places)
        self._met = dict.fromkeys(places, time.monotonic())  # When the table last had a peer.
        self._connected = dict[str, PeerID]()  # At the last look.
        self._troubles, self._looks_alone = dict[str, str](), 0
        self._first = {*seeds, *(each for place in places.values() for each in place.split(","))}
        self._secret = hashlib.sha256(f"reader\n{run}\n{secret}".encode()).digest()
        self._values: dict[str, tuple[bytes, bytes]] = {}  # With their SHA-256.
        self._changed, self._dials = asyncio.Event(), dict[str, asyncio.Task[None]]()
        self._loop = _Loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(seeds, listen, advertise), self._loop).result()

    async def _start(self, seeds: list[str], listen: str, advertise: str) -> None:
        # The courier that takes this one's place has the same key, by which others know it: they were told to join it.
        seed = hmac.digest(self._secret, self._peer.encode(), "sha256")
        public = Ed25519PrivateKey.from_private_bytes(seed).public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
        with open(os.memfd_create("accelmgr-outer-key"), "wb", buffering=0) as file:
            file.write(b"\x08\x01\x12\x40" + seed + public)  # As libp2p writes an Ed25519 key.
            self._p2p = await P2P.create(
                identity_path=f"/proc/{os.getpid()}/fd/{file.fileno()}",
                check_if_identity_free=False,
                host_maddrs=(listen or "/ip4/0.0.0.0/tcp/0").split(","),
                announce_maddrs=advertise.split(",") if advertise else None,
                use_relay=False,
            )
        self._node = await DHTNode.create(self._p2p, record_validator=_Signed(self._secret))
        await self._p2p.add_protobuf_handler(HANDLER, self._answer, BytesValue)
        self._looking = asyncio.create_task(self._look())

    # Serving

    def publish(self, key: str, value: bytes | None) -> None:
        digest = b"" if value is None else hashlib.sha256(value).digest()
        self._loop.call_soon_threadsafe(self._put, key, digest, value)

    def _put(self, key: str, digest: bytes, value: bytes | None) -> None:
        self._values.pop(key, None)
        if value is not None:
            self._values[key] = digest, value
        self._changed.set()
        self._changed = asyncio.Event()

    def _token(self, reader: PeerID) -> bytes:
        """Lets this peer read. Of no use to others: p2pd knows who asks."""
        return hmac.digest(self._secret, reader.to_bytes(), "sha256")

    async def _answer(self, request: BytesValue, context: P2PContext) -> BytesValue:
        token, peer, *asked = MSGPackSerializer.loads(request.value)
        if not hmac.compare_digest(token, self._token(context.remote_id)):
            raise PermissionError
        if peer == self._peer:
            return BytesValue(value=await self._piece(*asked))
        if peer not in self._connected:
            raise _NoWay(f"there is no connection to {peer}")
        return BytesValue(value=await self._call(self._connected[peer], ANSWER_S, peer, *asked))

    async def _piece(self, wait: float, key: str, known: bytes, of: bytes, begin: int) -> bytes:
        """SHA-256 and length of a value, where the piece begins, and the piece; b"": there is none but the known one.

        begin: in the value with the SHA-256 `of`; another one begins at 0.
        """
        until = time.monotonic() + min(60.0, wait)
        while (entry := self._values.get(key)) is None or entry[0] == known:
            if (left := until - time.monotonic()) <= 0:
                return b""
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait(), left)
        digest, value = entry
        begin = begin if digest == of else 0
        return digest + len(value).to_bytes(8, "big") + begin.to_bytes(8, "big") + value[begin : begin + PIECE]

    # Asking

    async def _ask(self, peer: str, *asked: Any) -> bytes:
        """asked: as _piece() takes it."""
        if peer == self._peer:
            return await self._piece(*asked)
        if peer not in self._places:
            raise Absent(f"the address of {peer} is not known", is_gone=True)
        ways = [] if peer in self._connected else list(self._connected.values())
        for way in random.sample(ways, min(MOST_WAYS, len(ways))):
            with contextlib.suppress(_NoWay):
                return await self._call(way, 2 * ANSWER_S, peer, *asked)
        return await self._call(_id_of(self._places[peer]), ANSWER_S, peer, *asked)

    async def _call(self, way: PeerID, patience: float, peer: str, wait: float, *asked: Any) -> bytes:
        """Has `way` answer for `peer`, which it is or asks."""
        request = BytesValue(value=MSGPackSerializer.dumps([self._token(self._p2p.peer_id), peer, wait, *asked]))
        call = self._p2p.call_protobuf_handler(way, HANDLER, request, BytesValue)
        try:
            return bytes((await asyncio.wait_for(call, wait + patience)).value)
        except (P2PHandlerError, P2PDaemonError, OSError, asyncio.TimeoutError) as error:
            if "_NoWay" in str(error):
                raise _NoWay(f"{peer} is not connected", is_gone=True) from error
            if "PermissionError" in str(error):
                raise Refused(f"{peer} has another secret or another run") from error
            raise Absent(f"{peer} does not answer: {error!r}", is_gone=True) from error

    def fetch(self, key: str, peer: str, deadline: float, known: bytes | None = None) -> bytes:
        return asyncio.run_coroutine_threadsafe(self._fetch(key, peer, deadline, known), self._loop).result()

    async def _fetch(self, key: str, peer: str, deadline: float, known: bytes | None) -> bytes:
        known_digest = b"" if known is None else hashlib.sha256(known).digest()
        digest, value = b"", bytearray()
        while True:
            wait = max(0.0, min(60.0, deadline - time.monotonic()))
            answer = await self._ask(peer, wait, key, known_digest, digest, len(value))
            digest, count, begin = answer[:32], *(int.from_bytes(answer[at : at + 8], "big") for at in (32, 40))
            if (key == "record" and count > MOST_RECORD) or begin not in (0, len(value)) or len(answer) > 48 + PIECE:
                raise Refused(f"{peer} sends what no peer sends")
            value[begin:] = answer[48:]
            if answer and len(value) >= count:
                return bytes(value)
            if not answer[48:] and time.monotonic() >= deadline:
                raise Absent(f"{peer} has not published {key}")

    # Finding each other

    async def _look(self) -> None:
        try:
            while True:
                own = ",".join(map(str, await self._p2p.get_visible_maddrs(latest=True)))
                self._places[self._peer] = own
                # The table forgets what has expired by its clock, which may be another than this machine's.
                await self._node.store(self._table_key, own, time.time() + FORGET_S, subkey=self._peer)
                found = await self._node.get(self._table_key, latest=True)
                for name, entry in found.value.items() if found is not None else ():
                    self._note(name, entry.value)
                addresses = self._first.union(*(place.split(",") for place in self._places.values()))
                connected = {each.peer_id for each in await self._p2p.list_peers()}
                others = {name: _id_of(self._places[name]) for name in self.peers()}
                self._connected = {name: each for name, each in others.items() if each in connected}
                self._looks_alone = 0 if others or not connected else self._looks_alone + 1
                met = {self._p2p.peer_id, *connected.intersection(self._node.protocol.routing_table.peer_id_to_uid)}
                self._dials = {address: task for address, task in self._dials.items() if not task.done()}
                for address in addresses - self._dials.keys():
                    if _id_of(address) not in met:
                        self._dials[address] = asyncio.create_task(self._dial(address))
                await asyncio.sleep(LOOK_S)
        except Exception:  # p2pd has ended, for instance. The host starts another courier.
            traceback.print_exc()
            os._exit(1)

    def _note(self, peer: str, place: str) -> None:
        now = time.monotonic()
        if peer != self._peer:
            self._places[peer], self._met[peer] = place, now
        for gone in [each for each, met in self._met.items() if now - met > FORGET_S and each != self._peer]:
            del self._places[gone], self._met[gone]

    async def _dial(self, address: str) -> None:
        try:
            # hivemind writes the name of a relay in a way that p2pd cannot read; p2pd finds it out by itself.
            direct = [] if "/p2p-circuit" in address else [Multiaddr(address.rpartition("/p2p/")[0])]
            await self._p2p._client.connect(_id_of(address), direct)
            await self._node.protocol.call_ping(_id_of(address))  # The table is now of both.
            self._troubles.pop(address, None)
        except (P2PDaemonError, OSError, ValueError) as error:
            if address in self._first:
                self._troubles[address] = f"{address} does not answer: {error}"

    def address(self) -> str:
        return self._places.get(self._peer, "")

    def peers(self) -> set[str]:
        return set(self._places) - {self._peer}

    def places(self) -> dict[str, str]:
        return dict(self._places)

    def trouble(self) -> str:
        if self._looks_alone > 3:  # The table is found out within some.
            return "those that are connected have another run or another secret"
        return "" if self.peers() else "; ".join(dict(self._troubles).values())

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._looking.cancel)
        asyncio.run_coroutine_threadsafe(self._p2p.shutdown(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
