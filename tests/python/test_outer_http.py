"""Bytes by way of HTTP: few connections, and nothing of peers that have been gone for long."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from accelmgr.outer import _http
from accelmgr.outer._http import Http

BOUND_S = 60.0


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


def fetch(reader: Http, key: str, peer: str) -> bytes:
    return reader.fetch(key, peer, time.monotonic() + BOUND_S)


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
