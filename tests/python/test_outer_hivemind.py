"""Rounds between machines by way of hivemind's network: each peer has a courier, and this a program p2pd."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pathlib
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from launching import kill
from outer_peers import BOUND_S, WHOLE, Peer, make_round, make_round_of_all, meet, simulated, swarm_of, wait_until

import accelmgr
from accelmgr.outer._transport import FORGET_S, Absent, Refused

pytest.importorskip("hivemind", reason="the optional extra accelmgr[hivemind] is not installed")
from accelmgr.outer import _hivemind
from accelmgr.outer._hivemind import ANSWER_S, Hivemind

HERE = "/ip4/127.0.0.1/tcp/0"
OTHER = """import sys
from accelmgr.outer._hivemind import Hivemind
transport = Hivemind("other", "run", "secret", sys.argv[1].split(","), "/ip4/127.0.0.1/tcp/0", "", {})
transport.publish("key", b"value")
sys.stdin.read()
"""


def children(pid: int) -> list[int]:
    files = pathlib.Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for file in files for child in file.read_text().split()]


@contextlib.contextmanager
def ends(pids: list[int]) -> Iterator[None]:
    """These processes end in here."""
    fds = [os.pidfd_open(pid) for pid in pids]
    yield
    for fd in fds:
        assert select.select([fd], [], [], BOUND_S)[0]
        os.close(fd)


def join(stack: contextlib.ExitStack, peers: list[Peer], **options: object) -> Peer:
    """One more peer; the first one begins the swarm, and the others join it by its address."""
    place = peers[0].outer.address if peers else "p2p"
    peer = Peer(len(peers), f"run@{place}", **{"listen": HERE, **options})  # type: ignore[arg-type]
    stack.callback(peer.close)
    peers.append(peer)
    wait_until(peers, lambda: bool(peer.outer.address))
    return peer


def test_rounds_are_those_of_the_algorithm() -> None:
    with contextlib.ExitStack() as stack:
        peers: list[Peer] = []
        for _ in range(3):
            join(stack, peers, payload="float32")
        meet(peers)
        for number in range(1, 4):
            assert make_round(peers) == number
            assert {each.outer.participants for each in peers} == {3}
        for mine, expected in zip(peers, simulated([WHOLE] * 3, 3, 0.5), strict=True):
            for value, other in zip(mine.values(), expected, strict=True):
                torch.testing.assert_close(value, other, rtol=1e-5, atol=1e-6)


def test_peers_come_later_and_couriers_are_replaced() -> None:
    with contextlib.ExitStack() as stack:
        peers: list[Peer] = []
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        join(stack, peers, listen=f"/ip4/127.0.0.1/tcp/{port}")
        join(stack, peers)
        meet(peers)
        make_round(peers)
        join(stack, peers, seed=7)
        meet(peers)
        assert peers[2].outer.round == 1
        address = peers[0].outer.address
        for victim, is_daemon in ((0, False), (1, True)):
            courier = peers[victim].outer.courier_pid
            daemons = children(courier)
            assert len(daemons) == 1
            with ends([courier, *daemons]):
                kill(daemons[0] if is_daemon else courier)
            wait_until(peers, lambda: peers[victim].outer.courier_pid != courier)  # noqa: B023
            meet(peers)
            make_round_of_all(peers)
        wait_until(peers, lambda: peers[0].outer.address == address)  # Others may have been told to join it.
        couriers = [each.outer.courier_pid for each in peers]
        stack.enter_context(ends(couriers + [daemon for courier in couriers for daemon in children(courier)]))
        for each in peers:
            each.outer.close()


@contextlib.contextmanager
def transport_of(
    peer: str, first: Hivemind | None = None, secret: str = "secret", advertise: str = ""
) -> Iterator[Hivemind]:
    seeds = [] if first is None else first.address().split(",")
    transport = Hivemind(peer, "run", secret, seeds, HERE, advertise, {})
    try:
        knows(transport, peer)
        yield transport
    finally:
        transport.close()


@pytest.fixture
def one() -> Iterator[Hivemind]:
    with transport_of("one") as transport:
        yield transport


def in_time() -> float:
    return time.monotonic() + BOUND_S


def knows(transport: Hivemind, peer: str) -> None:
    wait_for(transport, lambda: peer in transport.places())


def wait_for(transport: Hivemind, holds: Callable[[], bool]) -> None:
    deadline = in_time()
    while not holds():
        assert time.monotonic() < deadline
        with contextlib.suppress(Absent):  # It has no such value, and says so after this time.
            transport.fetch("none", transport._peer, time.monotonic() + 0.1)


def test_values_of_any_length_pass_and_the_known_one_is_not_sent_again(one: Hivemind) -> None:
    with transport_of("two", one) as two:
        knows(one, "two")
        knows(two, "one")
        two.publish("key", b"")
        assert one.fetch("key", "two", in_time()) == b""
        assert two.places()["one"] == one.address()
        big = os.urandom(20_000_000)
        two.publish("big", big)
        assert one.fetch("big", "two", in_time()) == big
        with pytest.raises(Absent) as absent:
            one.fetch("big", "two", time.monotonic() + 0.2, big)
        assert not absent.value.is_gone
        later = threading.Timer(0.1, two.publish, ("big", b"another"))
        later.start()
        assert one.fetch("big", "two", in_time(), big) == b"another"
        later.join()
        two.publish("big", None)
        with pytest.raises(Absent):
            one.fetch("big", "two", time.monotonic())
        two.publish("own", b"mine")
        assert two.fetch("own", "two", in_time()) == b"mine"
    with pytest.raises(Absent) as absent:
        one.fetch("key", "two", time.monotonic())
    assert absent.value.is_gone


def test_peers_that_cannot_connect_ask_by_way_of_one_that_both_reach(one: Hivemind) -> None:
    with contextlib.ExitStack() as stack:
        # Nothing listens there: as if a router were before them.
        closed = [stack.enter_context(socket.socket()) for _ in range(2)]
        for each in closed:
            each.bind(("127.0.0.1", 0))
        places = [f"/ip4/127.0.0.1/tcp/{each.getsockname()[1]}" for each in closed]
        two = stack.enter_context(transport_of("two", one, advertise=places[0]))
        with transport_of("three", one, advertise=places[1]) as three:
            for reader, other in ((two, three), (three, two)):
                knows(reader, other._peer)
                big = os.urandom(3_000_000)
                other.publish("big", big)
                assert reader.fetch("big", other._peer, in_time()) == big
                assert other._peer not in reader._connected
                later = threading.Timer(0.1, other.publish, ("big", b"another"))
                later.start()
                assert reader.fetch("big", other._peer, in_time(), big) == b"another"
                later.join()
                with pytest.raises(Absent) as absent:
                    reader.fetch("none", other._peer, time.monotonic() + 0.1)
                assert not absent.value.is_gone
        with pytest.raises(Absent) as absent:
            two.fetch("big", "three", time.monotonic())
        assert absent.value.is_gone


def test_who_has_another_secret_reads_nothing_and_is_not_listed(one: Hivemind, monkeypatch: pytest.MonkeyPatch) -> None:
    one.publish("key", b"value")
    monkeypatch.setattr(_hivemind, "LOOK_S", 0.1)

    def listed() -> set[str]:
        found = asyncio.run_coroutine_threadsafe(one._node.get(one._table_key, latest=True), one._loop).result()
        return set(found.value)

    with transport_of("two", one, "another") as two:
        wait_for(two, lambda: "another secret" in two.trouble())
        two._places["one"] = one.address()
        with pytest.raises(Refused, match="secret"):
            two.fetch("key", "one", in_time())
        assert listed() == {"one"}
        two._node.protocol.record_validator = None  # As any node of hivemind.
        for name, place in (("three", two.address()), ("one", two.address()), ("four", 17)):
            store = two._node.store(two._table_key, place, time.time() + 2 * FORGET_S, subkey=name)
            asyncio.run_coroutine_threadsafe(store, two._loop).result()
        assert listed() == {"one"}


def test_an_address_at_which_nobody_answers_is_named(one: Hivemind) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        place = re.sub("/tcp/[0-9]+/", f"/tcp/{closed.getsockname()[1]}/", one.address())
        with contextlib.closing(Hivemind("two", "run", "secret", [place], HERE, "", {})) as two:
            knows(two, "two")
            wait_for(two, lambda: two.trouble().startswith(f"{place} does not answer: "))


def test_a_peer_that_stops_or_dies_is_gone_in_time_and_leaves_no_process(one: Hivemind) -> None:
    command = [sys.executable, "-c", OTHER, one.address()]
    other = subprocess.Popen(command, stdin=subprocess.PIPE, env=os.environ | {"PYTHONPATH": ":".join(sys.path)})
    try:
        knows(one, "other")
        assert one.fetch("key", "other", in_time()) == b"value"
        threads = threading.active_count()
        os.kill(other.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, other.pid, os.WSTOPPED)
        began = time.monotonic()
        with pytest.raises(Absent) as absent:
            one.fetch("key", "other", began + 0.5)
        assert absent.value.is_gone
        assert time.monotonic() - began < 0.5 + ANSWER_S + 10
        os.kill(other.pid, signal.SIGCONT)
        assert one.fetch("key", "other", in_time()) == b"value"
        daemons = children(other.pid)
        assert len(daemons) == 1
        with ends(daemons):
            other.kill()
            other.wait()
        with pytest.raises(Absent) as absent:
            one.fetch("key", "other", time.monotonic())
        assert absent.value.is_gone
        assert threading.active_count() <= threads
    finally:
        other.kill()
        other.wait()


def test_without_hivemind_it_says_what_to_install(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hivemind.py").write_text("raise ModuleNotFoundError(\"No module named 'hivemind'\")")
    monkeypatch.syspath_prepend(tmp_path)
    with swarm_of(lambda: Peer(0, "run@p2p")) as peers:
        with pytest.raises(
            accelmgr.SessionError, match=r"No module named 'hivemind'.* pip install 'accelmgr\[hivemind\]'"
        ):
            wait_until(peers, lambda: False)
