"""Bytes by way of HTTP and of a folder: few connections, and nothing of peers that have been gone for long."""

from __future__ import annotations

import contextlib
import http.server
import os
import pathlib
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from accelmgr.outer import _http
from accelmgr.outer._folder import Folder
from accelmgr.outer._http import Http

BOUND_S = 60.0
OWN = {"own": "127.0.1.1", "elsewhere": "192.0.2.1"}


@contextlib.contextmanager
def peers(*names: str) -> Iterator[list[Http]]:
    """The others know the first one's address."""
    with contextlib.ExitStack() as stack:
        made: list[Http] = []
        for name in names:
            seeds = [made[0].address()] if made else []
            made.append(Http(name, "run", "secret", seeds, "127.0.0.1:0"))
            stack.callback(made[-1].close)
        yield made


@pytest.fixture(autouse=True)
def noted(monkeypatch: pytest.MonkeyPatch) -> threading.Condition:
    """Notified when a transport has heard of a peer."""
    condition, note = threading.Condition(), Http._note

    def note_and_tell(self: Http, *arguments: Any, **options: Any) -> None:
        note(self, *arguments, **options)
        with condition:
            condition.notify_all()

    monkeypatch.setattr(Http, "_note", note_and_tell)
    return condition


def wait_until(noted: threading.Condition, holds: Callable[[], bool]) -> None:
    with noted:
        assert noted.wait_for(holds, BOUND_S)


def fetch(reader: Http | Folder, key: str, peer: str) -> bytes:
    return reader.fetch(key, peer, time.monotonic() + BOUND_S)


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
def test_peers_reach_each_other_by_ipv6_and_ipv4(noted: threading.Condition) -> None:
    with contextlib.ExitStack() as stack:

        def made(name: str, seed: str, listen: str) -> Http:
            transport = Http(name, "run", "secret", [seed] if seed else [], listen)
            stack.callback(transport.close)
            transport.publish("key", name.encode())
            return transport

        six = made("six", "", "[::1]:0")
        both = made("both", six.address(), "")
        port = both.address().rpartition(":")[2]
        four = made("four", f"127.0.0.1:{port}", "127.0.0.1:0")
        wait_until(noted, lambda: len(six.peers()) == len(both.peers()) == len(four.peers()) == 2)
        assert six.places()["both"] == f"[::1]:{port}" and four.places()["both"] == f"127.0.0.1:{port}"
        assert both.places()["four"] == four.address() and both.places()["six"] == six.address()
        for reader in (six, both, four):
            assert [fetch(reader, "key", each) for each in sorted(reader.peers())] == [
                each.encode() for each in sorted(reader.peers())
            ]


def test_a_name_of_this_machine_is_served_at_all_of_its_addresses(
    monkeypatch: pytest.MonkeyPatch, noted: threading.Condition
) -> None:
    """Debian gives a machine's own name the address 127.0.1.1, which no other machine can reach."""
    find = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *more, **kinds: find(OWN.get(host, host), *more, **kinds))
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with contextlib.closing(Http("first", "run", "secret", [f"elsewhere:{port}", f"own:{port}"])) as first:
        first.publish("key", b"value")
        with contextlib.closing(Http("second", "run", "secret", [f"127.0.0.1:{port}"], "127.0.0.1:0")) as second:
            wait_until(noted, lambda: second.peers() == {"first"})
            assert fetch(second, "key", "first") == b"value"


def test_who_is_reached_by_nobody_is_told_so(monkeypatch: pytest.MonkeyPatch, noted: threading.Condition) -> None:
    """As behind a router: it hears the others and makes their rounds, and no round has its changes."""
    for name, seconds in (("LOOK_S", 0.1), ("SILENT_S", 0.5)):
        monkeypatch.setattr(_http, name, seconds)
    with contextlib.ExitStack() as stack, socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{closed.getsockname()[1]}"
        first, second = stack.enter_context(peers("first", "second"))
        hidden = Http("hidden", "run", "secret", [first.address()], "127.0.0.1:0", place)
        stack.callback(hidden.close)
        first.publish("key", b"value")
        wait_until(noted, lambda: hidden.peers() == {"first", "second"})
        deadline = time.monotonic() + BOUND_S
        while hidden.trouble() != f"no other peer reaches this one at {place} (`listen`, `advertise`)":
            assert time.monotonic() < deadline
            fetch(hidden, "key", "first")
        assert first.trouble() == second.trouble() == ""


def test_no_name_service_is_asked_for_this_machine_s_name(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[str]()
    monkeypatch.setattr(socket, "getfqdn", lambda name="": asked.append(name) or "name")
    with peers("first", "second"):
        Http("third", "run", "secret", []).close()
    assert asked == []


def test_threads_that_come_later_use_connections_of_those_before(
    monkeypatch: pytest.MonkeyPatch, noted: threading.Condition
) -> None:
    monkeypatch.setattr(_http, "LOOK_S", BOUND_S)
    with peers("one", "other") as (one, other):
        wait_until(noted, lambda: other.peers() == {"one"})
        one.publish("key", b"value")
        for _ in range(20):
            thread = threading.Thread(target=fetch, args=(other, "key", "one"))
            thread.start()
            thread.join()
        assert sum(map(len, other._idle.values())) == 1


def test_what_a_peer_has_heard_itself_is_not_replaced_by_what_others_say(noted: threading.Condition) -> None:
    with peers("one", "other") as (one, other):
        wait_until(noted, lambda: one.peers() == {"other"})
        one._note("other", "127.0.0.1:9")  # By way of a peer in another network, for instance.
        other.publish("key", b"value")
        assert fetch(one, "key", "other") == b"value"


@pytest.mark.parametrize("body", [b"[]", b'{"evil": "127.0.0.1:9"}', b"x" * 100], ids=["list", "peers", "text"])
def test_what_is_no_peer_is_not_believed_and_ends_nothing(
    body: bytes, monkeypatch: pytest.MonkeyPatch, noted: threading.Condition
) -> None:
    """Another program has a peer's former address."""
    monkeypatch.setattr(_http, "LOOK_S", 0.02)
    asked = threading.Semaphore(0)

    class Other(http.server.BaseHTTPRequestHandler):
        def log_message(self, format: str, *arguments: Any) -> None:
            pass

        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)
            asked.release()

    with http.server.HTTPServer(("127.0.0.1", 0), Other) as server, peers("one") as (one,):
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        one._seeds.append(f"127.0.0.1:{server.server_address[1]}")
        for _ in range(3):
            assert asked.acquire(timeout=BOUND_S)
        with peers("other") as (other,):
            one._seeds.append(other.address())
            wait_until(noted, lambda: one.peers() == {"other"})
        server.shutdown()


def test_a_folder_forgets_who_was_switched_off_long_ago(tmp_path: pathlib.Path) -> None:
    one, gone = (Folder(tmp_path, "run", name) for name in ("one", "gone"))
    gone.publish("record", b"old")
    one.publish("record", b"new")
    results = tmp_path / "run" / "results"  # Somebody's, and old.
    results.mkdir()
    os.utime(results, (0, 0))
    assert one.peers() == {"gone"}
    os.utime(tmp_path / "run" / "gone" / "record", (0, 0))
    assert not one.peers()
    assert not (tmp_path / "run" / "gone").exists() and results.exists()
    gone.publish("record", b"newer")  # It was stopped.
    assert fetch(one, "record", "gone") == b"newer"


def test_a_large_value_is_sent_in_pieces_each_of_which_may_take_its_time(
    monkeypatch: pytest.MonkeyPatch, noted: threading.Condition
) -> None:
    sizes: list[int] = []
    write = socketserver._SocketWriter.write
    monkeypatch.setattr(
        socketserver._SocketWriter, "write", lambda self, data: sizes.append(len(data)) or write(self, data)
    )
    with peers("one", "other") as (one, other):
        wait_until(noted, lambda: other.peers() == {"one"})
        one.publish("key", value := os.urandom(3_500_000))
        assert fetch(other, "key", "one") == value
    assert max(sizes) == 1 << 20


def test_two_halves_that_have_forgotten_each_other_meet_again(
    monkeypatch: pytest.MonkeyPatch, noted: threading.Condition
) -> None:
    monkeypatch.setattr(_http, "LOOK_S", 0.02)
    monkeypatch.setattr(_http, "FORGET_S", 0.5)
    ask, is_cut = Http._ask, threading.Event()

    def ask_or_fail(self: Http, address: str, *arguments: Any) -> tuple[int, bytes]:
        if is_cut.is_set() and address != sides[self]:
            raise ConnectionError
        return ask(self, address, *arguments)

    monkeypatch.setattr(Http, "_ask", ask_or_fail)
    sides: dict[Http, str] = {}
    with peers("a", "b", "c", "d") as made:
        for peer, other in ((0, 1), (1, 0), (2, 3), (3, 2)):
            sides[made[peer]] = made[other].address()
        wait_until(noted, lambda: all(len(peer.peers()) == 3 for peer in made))
        for peer in made:
            peer._seeds.clear()  # The first one's machine has another address now.
        is_cut.set()
        wait_until(noted, lambda: all(len(peer.peers()) == 1 for peer in made))
        is_cut.clear()
        wait_until(noted, lambda: all(len(peer.peers()) == 3 for peer in made))


def test_a_peer_that_has_been_gone_for_long_is_forgotten_by_all(
    monkeypatch: pytest.MonkeyPatch, noted: threading.Condition
) -> None:
    monkeypatch.setattr(_http, "LOOK_S", 0.02)
    monkeypatch.setattr(_http, "SILENT_S", 0.3)
    monkeypatch.setattr(_http, "FORGET_S", 1.0)
    with peers("one", "two") as (one, two):
        with peers("gone") as (gone,):
            gone._seeds.append(one.address())
            wait_until(noted, lambda: "gone" in one.peers() & two.peers())
        wait_until(noted, lambda: (one.peers(), two.peers()) == ({"two"}, {"one"}))
        assert not one._idle.keys() - {two.address()}
