# Runs in: the host, which serves elements; the manager, which asks for them.
"""Datasets that only the host can read: read here, and served to the manager process over a Unix socket.

The manager process asks for one element at a time, by its number, and only if a queue of the session has room for it.
So the host reads the dataset exactly as far as the session holds elements. It keeps the elements, as bytes, until a
committed step has consumed them. A manager that takes over a session asks for the elements that no step has consumed,
and gets the same ones. For a consumed element it gets the first element instead: it only counts them.

Protocol: the client sends the token, then numbers of elements. The answer to each number is a HEADER (kind, whether
another epoch follows, length, and the checksums of all elements before this one and with it), and that many bytes.
Where an epoch or a batch ends before an element, the answer is END_OF_PART, and the client asks again with PAST.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hmac
import logging
import os
import queue
import secrets
import signal
import socket
import struct
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from types import FrameType, GeneratorType
from typing import Any

import torch

from accelmgr._data.loaders import LoaderElements, dumped
from accelmgr._data.reading import (
    Reading,
    checksum,
    generator_states,
    is_indexed,
    seed_generators,
    set_generator_states,
)
from accelmgr._serialization.describe import describe
from accelmgr.errors import DataError

logger = logging.getLogger("accelmgr")

REQUEST = struct.Struct("<Q")
HEADER = struct.Struct("<B?QII")
EXAMPLE = 2**64 - 1  # A request for the first element, which works also after that was consumed.
PAST = 2**62  # Added to a number: the client knows that a part ended before that element.
ELEMENT, CONSUMED, END, FAILED, END_OF_PART = range(5)

Sums = tuple[int, int]
"""Checksums of all elements before one, and with it; zeros for a dataset that is read by index."""
Answer = tuple[int, bool, bytes, Sums]
"""The kind (ELEMENT, ...), whether another epoch follows, the element's bytes, and its checksums."""

OWN_SEED = 0x64617461  # With torch's initial seed: the dataset must not draw what the host draws.
TOKEN_BYTES = 32
GREETING_S = 5.0  # The most time until the token arrives.
JOIN_S = 2.0  # The most time until a thread ends that is not inside the dataset.
LOOK_S = 0.1  # How often a thread that waits for the dataset's own thread looks whether it is still wanted.
MOMENT_S = 0.002  # After an element the manager process asks for the next one sooner than that.
POLL_S = 0.0001  # How often the host's thread looks, in waits that a signal may end.
LATE_S = 1.0  # The most time that a call of the manager waits, when it is done, for an element that is being read.
RETRY_S = 0.5  # The pause after accept() failed for want of a descriptor or of memory.


# The side of the manager process


def _receive(connection: socket.socket, count: int) -> bytes | None:
    """Receives `count` bytes; None at the end of the stream."""
    data = bytearray(count)
    memory = memoryview(data)
    while memory:
        got = connection.recv_into(memory)
        if got == 0:
            return None
        memory = memory[got:]
    return bytes(data)


def _peer_uid(connection: socket.socket) -> int:
    _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(uid)


class Client:
    """The connection of the manager process to the dataset. One thread may use it."""

    def __init__(self, address: FeedAddress) -> None:
        self._pid = address.pid
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._connection.connect(address.name)
        except OSError as error:
            self._connection.close()
            text = f"the dataset is in process {self._pid}, which no longer serves it: {error}"
            raise DataError(text) from error
        if _peer_uid(self._connection) != os.geteuid():
            self._connection.close()
            raise DataError("the socket of the dataset belongs to another user")
        self._connection.sendall(address.token)
        self._example: bytes | None = None
        self.sums: Sums | None = None
        """The checksums of the last element; None if they are not known."""
        self.more = False
        """As Reading.more_epochs."""
        self._ended_before = -1  # The last element before which an epoch or a batch was found to end.

    def example(self) -> bytes | None:
        """The first element; None when there is none. Blocks while the dataset is read, and raises its exception."""
        self._example = self._ask(EXAMPLE)
        return self._example

    def get(self, number: int) -> bytes | None:
        """Element `number`, as dump() makes it. For a consumed one: the first element. None at the end, also of a part:
        then the next call for this number gives it.
        """
        return self._ask(number | (PAST if number == self._ended_before else 0))

    def _ask(self, number: int) -> bytes | None:
        try:
            self._connection.sendall(REQUEST.pack(number))
            header = _receive(self._connection, HEADER.size)
            kind, more, length, *sums = HEADER.unpack(header) if header is not None else (FAILED, False, 0, 0, 0)
            data = _receive(self._connection, length) if header is not None else None
        except OSError:
            data = None
        if data is None:
            raise DataError(f"process {self._pid}, which reads the dataset, has ended or closed its manager")
        if kind == FAILED:
            raise DataError(data.decode())
        self.sums = None if kind == CONSUMED else (sums[0], sums[1])
        self.more = more
        if kind == END_OF_PART:
            self._ended_before = number & ~PAST
        if kind in (END, END_OF_PART):
            return None
        return self._example if kind == CONSUMED else data


@dataclasses.dataclass(frozen=True)
class FeedAddress:
    """What the manager process gets instead of the dataset."""

    name: bytes  # In the abstract namespace, where names vanish with their socket.
    token: bytes
    pid: int

    def connect(self) -> Client:
        return Client(self)


# The side of the host


def is_of_thread(error: BaseException) -> bool:
    """Whether the error says that only one thread may read the dataset, as errors of sqlite3's connections do."""
    return isinstance(error, Exception) and "thread" in str(error).lower()


def _holds_sqlite(dataset: Any) -> bool:
    """Whether a generator has variables that only the thread which made them may use. A failed try would end it."""
    sqlite = sys.modules.get("sqlite3")
    if sqlite is None or not isinstance(dataset, GeneratorType) or dataset.gi_frame is None:
        return False
    return any(isinstance(value, (sqlite.Connection, sqlite.Cursor)) for value in dataset.gi_frame.f_locals.values())


OF_THREAD = (
    "\nThis process reads the dataset: in a thread of its own, or in the thread that calls step(). Open what is bound "
    "to a thread where it is used first, in __getitem__() or __iter__() or in the body of the generator (for SQLite "
    "also: sqlite3.connect(..., check_same_thread=False))"
)


class _Owner:
    """Calls functions in the thread that made the dataset: in work(), while it waits for the manager process."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], Any]] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def call(self, function: Callable[[], Any], wanted: Callable[[], bool]) -> Any:
        """Blocks until work() has called `function`. Returns None as soon as wanted() is false."""
        self._calls.put(function)
        while wanted():
            with contextlib.suppress(queue.Empty):
                result, error = self._results.get(timeout=LOOK_S)
                if error is not None:
                    raise error
                return result
        return None

    def work(self) -> None:
        """Does what is wanted now. Returns when nothing has been wanted for a moment.

        Ctrl-C waits for the element that is being read, since what is raised inside an iterator ends it. A second one
        does not wait.
        """
        came = False
        handler = signal.getsignal(signal.SIGINT)

        def note(number: int, frame: FrameType | None) -> Any:
            nonlocal came
            if came and callable(handler):
                return handler(number, frame)
            came = True

        defers = callable(handler) and threading.current_thread() is threading.main_thread()
        if defers:
            signal.signal(signal.SIGINT, note)
        try:
            while not came and self._did_one():
                pass
        finally:
            if defers and signal.getsignal(signal.SIGINT) is note:
                signal.signal(signal.SIGINT, handler)
        if came:
            signal.raise_signal(signal.SIGINT)

    def _did_one(self) -> bool:
        # SimpleQueue.get(timeout=) may wait for ever after a signal handler that does not raise (Python 3.11).
        end = time.monotonic() + MOMENT_S
        while self._calls.empty():
            if time.monotonic() > end:
                return False
            time.sleep(POLL_S)
        function = self._calls.get()
        try:
            self._results.put((function(), None))
        except BaseException as error:
            self._results.put((None, error))
        return True


class Turns:
    """Gives dataset and host states of their own for the random generators that they share. The dataset is read while
    the host waits in a call of the manager; meanwhile the generators have the dataset's states.

    So the same seed gives the same elements, whatever the host draws between steps, and the host the same numbers.
    """

    def __init__(self, states: bytes) -> None:
        """states: what the dataset begins with."""
        self._states = states
        self._of_host = b""  # The host's states, while the dataset's are in place.
        self._left = b""  # The dataset's states, while the host's are put back.
        # A signal handler may raise anywhere in the host's thread. It takes the lock itself, because methods of a
        # Condition that are interrupted keep it, or release it twice; and it does not wait for the Condition.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._taken = False  # There is a host that says when it waits.
        self._open = False
        self._inside = False
        self._ended = False

    def __enter__(self) -> None:
        """The calling thread, the host's, waits from now on."""
        with self._lock:
            self._taken = self._open = True
            self._changed.notify_all()

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        """The host goes on. Idempotent: called again when a signal handler has cut the first call short."""
        if not self._taken:
            return
        self._open = False
        deadline = time.monotonic() + LATE_S
        while self._inside and not self._ended:
            if time.monotonic() < deadline:
                time.sleep(POLL_S)
                continue
            self._ended = True  # The dataset may wait for what the host does next.
            logger.warning(
                "reading an element takes more than %g s: from now on the dataset is read while this process "
                "does other things, and shares torch's, NumPy's and Python's random generators with it; give "
                "it generators of its own if it draws",
                LATE_S,
            )
        with self._lock:
            if self._of_host:
                self._left = self._left or generator_states()
                set_generator_states(self._of_host)
                self._states, self._left, self._of_host = self._left, b"", b""

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Blocks until the host waits."""
        with self._lock:
            while self._taken and not self._open and not self._ended:
                self._changed.wait(LOOK_S)  # Looks again: a signal handler may have kept the host from telling.
            self._inside = True
            if self._open and not self._ended and not self._of_host:
                self._of_host = generator_states()
                set_generator_states(self._states)
        try:
            yield
        finally:
            with self._lock:
                self._inside = False

    def end(self) -> None:
        with self._lock:
            self._ended = True
            self._changed.notify_all()


def _own_states(dataset: Any) -> bytes:
    if isinstance(dataset, LoaderElements):
        return dataset.generators
    of_host = generator_states()
    seed_generators(torch.initial_seed() ^ OWN_SEED)
    states = generator_states()
    set_generator_states(of_host)
    return states


_feeds: weakref.WeakSet[Feed] = weakref.WeakSet()


class Feed:
    """Serves `dataset` to the manager process that has its address.

    All methods return at once; close() takes at most JOIN_S for each thread. The dataset is read in the thread of a
    connection, one for each manager process in turn, and may block there.
    """

    def __init__(self, dataset: Any, epochs: int = 1) -> None:
        self._dataset = dataset
        self._epochs = epochs
        self._elements = Reading(dataset, epochs, restorable=False)
        self._thread = _Owner() if _holds_sqlite(dataset) else None
        self._turns = Turns(_own_states(dataset))
        self._owner = os.getpid()
        self._closed = False
        self._turn = threading.Lock()  # The thread that reads the dataset holds it.
        self._reader = 0  # The id of that thread while it is inside the dataset, else 0.
        self._lock = threading.Lock()  # Guards the members below; held for short times.
        self._kept: dict[int, Answer] = {}  # Elements by number, _first to _next - 1.
        self._ends: dict[int, Answer] = {}  # Ends of parts, by the number of the element that follows.
        self._first = 0
        self._next = 0
        self._sum = 0  # The checksum of the elements so far.
        self._example: Answer | None = None
        self._over: Answer | None = None  # How the dataset ended.
        self._consumed: Callable[[], int] = lambda: 0
        self._most = 16
        name = b"\0accelmgr-feed-" + secrets.token_hex(8).encode()
        self.address = FeedAddress(name, secrets.token_bytes(TOKEN_BYTES), self._owner)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(name)
        self._listener.listen()
        self._connections: set[socket.socket] = set()
        self._threads: set[threading.Thread] = set()
        _feeds.add(self)
        self._start(_accept, weakref.ref(self), self._listener)

    def work(self) -> None:
        """Reads elements in this thread if the dataset is bound to one.

        Requires: step() or start() waits.
        """
        if (owner := self._thread) is not None:
            owner.work()

    @property
    def is_bound(self) -> bool:
        """Whether elements are read in the thread that calls step()."""
        return self._thread is not None

    def while_host_waits(self) -> contextlib.AbstractContextManager[None]:
        """In the block the calling thread, the host's, waits for the manager process, and elements are read. After the
        first such block no element is read outside of one.
        """
        return self._turns

    def host_goes_on(self) -> None:
        """Repeats the end of while_host_waits(), which a signal handler that raised may have cut short."""
        self._turns.close()

    def follow(self, consumed: Callable[[], int]) -> None:
        """From now on elements below consumed() are dropped. The feed's threads call consumed()."""
        self._consumed = consumed

    def close(self) -> None:
        """As end(), but waits for all threads except one inside the dataset.

        Requires: the manager process has ended.
        """
        self.end()
        for thread in list(self._threads):
            if thread is not threading.current_thread() and thread.ident != self._reader:
                thread.join(JOIN_S)

    def end(self) -> None:
        """Stops reading and serving; returns at once. Idempotent.

        Connections end with the manager process; until then requests get no answer. A thread that is inside the dataset
        ends when the dataset returns.
        """
        if os.getpid() != self._owner:
            return
        self._closed = True
        self._turns.end()
        try:
            self._listener.shutdown(socket.SHUT_RDWR)  # Wakes its accept().
        except OSError:
            pass
        self._listener.close()

    def _start(self, target: Callable[..., None], *arguments: Any) -> None:
        thread = threading.Thread(target=target, args=arguments, name="accelmgr-feed", daemon=True)
        thread.start()
        self._threads.add(thread)

    def _welcome(self, connection: socket.socket) -> None:
        if _peer_uid(connection) != os.geteuid():
            logger.warning("refused a connection to the dataset from another user (uid %d)", _peer_uid(connection))
            connection.close()
            return
        self._connections.add(connection)
        self._threads -= {thread for thread in self._threads if not thread.is_alive()}
        self._start(self._serve, connection)

    def _serve(self, connection: socket.socket) -> None:
        try:
            connection.settimeout(GREETING_S)
            token = _receive(connection, TOKEN_BYTES)
            if token is None or not hmac.compare_digest(token, self.address.token):
                return
            connection.settimeout(None)
            while (request := _receive(connection, REQUEST.size)) is not None:
                answer = self._answer(*REQUEST.unpack(request))
                if answer is not None:
                    kind, more, data, sums = answer
                    connection.sendall(HEADER.pack(kind, more, len(data), *sums) + data)
        except OSError:
            pass  # The client is gone, or has not sent its token in time.
        finally:
            self._connections.discard(connection)
            connection.close()

    def _answer(self, number: int) -> Answer | None:
        """The answer to a request; None when the feed is closed."""
        answer = self._find(number)
        if answer is not None:
            return answer
        with self._turn:
            while (answer := self._find(number)) is None and not self._closed:
                self._read(0 if number == EXAMPLE else number & ~PAST)
        return answer

    def _find(self, number: int) -> Answer | None:
        with self._lock:
            if number == EXAMPLE:
                return self._example or self._over
            if number in self._ends:  # The request is without PAST.
                return self._ends[number]
            number &= ~PAST
            if number in self._kept:
                return self._kept[number]
            if number < self._first:
                return CONSUMED, True, b"", (0, 0)
            return self._over

    def _read(self, wanted: int) -> None:
        """Reads an element. Elements before `wanted`, where a restored source begins, are passed over or not kept."""
        if is_indexed(self._dataset) and self._example is not None and wanted > self._next:
            self._elements.restore_index(wanted)
            with self._lock:
                self._kept.clear()
                self._first = self._next = wanted
        over: Answer | None = None
        answer: Answer = ELEMENT, True, b"", (0, 0)
        self._reader = threading.get_ident()
        try:
            boxed = self._next_element()
            before, more = self._sum, self._elements.more_epochs
            if boxed is None and more:
                with self._lock:
                    self._ends[self._next] = END_OF_PART, True, b"", (before, before)
                return
            if boxed is None:
                over = END, False, b"", (before, before)
            else:
                if not is_indexed(self._dataset):
                    self._sum = checksum(boxed[0], before)
                needed = self._next >= wanted or self._example is None
                answer = ELEMENT, more, dumped(boxed[0]) if needed else b"", (before, self._sum)
        except BaseException as error:  # SystemExit, too: the error must reach the host's own thread.
            text = describe(error) + (OF_THREAD if is_of_thread(error) else "")
            over = FAILED, False, text.encode("utf-8", "backslashreplace"), (0, 0)
        finally:
            self._reader = 0
        with self._lock:
            if over is not None:
                self._over = over
                return
            if self._example is None:
                self._example = answer
            if self._next >= wanted:
                self._kept[self._next] = answer
            else:
                self._kept.clear()
                self._first = self._next + 1
            self._next += 1
            if len(self._kept) <= self._most:
                return
        self._forget_consumed()

    def _next_of_dataset(self) -> list[Any] | None:
        with self._turns.reading():
            return self._elements.next() if not self._closed else None

    def _next_element(self) -> list[Any] | None:
        if self._thread is None:
            try:
                return self._next_of_dataset()
            except Exception as error:
                count = self._elements.count
                if (
                    not is_of_thread(error)
                    or isinstance(self._dataset, GeneratorType)
                    or (count > 0 and not is_indexed(self._dataset))
                ):
                    raise
                self._elements = Reading(self._dataset, self._epochs, restorable=False)
                if count > 0:
                    self._elements.restore_index(count)
                self._thread = _Owner()
        boxed: list[Any] | None = self._thread.call(self._next_of_dataset, lambda: not self._closed)
        return boxed

    def _forget_consumed(self) -> None:
        """Keeps the elements that were read and not consumed, and at most a quarter of them, or 16, besides."""
        consumed = self._consumed()
        with self._lock:
            while self._first < min(consumed, self._next):
                self._kept.pop(self._first, None)
                self._ends.pop(self._first, None)
                self._first += 1
            self._most = len(self._kept) + max(16, len(self._kept) // 4)

    def _leave_to_parent(self) -> None:
        """Called in a forked child. It has no thread of the feed; its descriptors would keep connections open."""
        self._closed = True
        self._listener.close()
        for connection in list(self._connections):
            connection.close()


def _accept(reference: weakref.ref[Feed], listener: socket.socket) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError as error:
            feed = reference()
            if feed is None or feed._closed:
                return
            del feed
            logger.warning("cannot accept the manager's connection to the dataset, trying again: %s", error)
            time.sleep(RETRY_S)
            continue
        feed = reference()
        if feed is None or feed._closed:
            connection.close()
            return
        feed._welcome(connection)
        del feed, connection


def _after_fork() -> None:
    for feed in list(_feeds):
        feed._leave_to_parent()


os.register_at_fork(after_in_child=_after_fork)
