"""Rounds of accelmgr.outer with a fault at each place: three couriers, and hosts that do what DiLoCo does.

The couriers are threads of this process. Each change that a host offers is one power of two, so outer parameters tell
which changes they have, how often, and whether one is missing that a round says it has.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import random
import select
import shutil
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle
import pytest
import torch

from accelmgr._memory.memfd import make_memfd
from accelmgr.outer import _courier, _exchange, _hearing, _pace, _state
from accelmgr.outer._channel import Channel, Given, Numbers, Status
from accelmgr.outer._courier import Courier
from accelmgr.outer._folder import Folder
from accelmgr.outer._leases import AGAIN, FIRST
from accelmgr.outer._settings import Settings
from accelmgr.outer._transport import Absent, Sealed

SHAPES = [(300,), (2, 3)]
SIZES = [300, 6]
STEP, WANTED = 5, 12
"""Elements that a change has, and that a peer wants to hold."""
BOUND_S = 30.0
FAULT_S = 1.5
"""How long a fault lasts that ends. The others count a peer as gone after 0.6 s."""
own = threading.local()
"""`life`: the Life of the courier whose main thread this is."""


class Killed(BaseException):
    """In every thread of a courier, from one call on."""


def descent(parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1.0)


class Fault:
    """What happens to one peer at its call number `at`.

    A call is one of the courier's transport, or a write of its state; if `kind` is of a host, a message that the host
    hears or sends.
    """

    def __init__(self, kind: str, at: int) -> None:
        self.kind, self.at = kind, at
        self.is_of_host = kind.startswith("host")
        self.calls = 0
        self.trace: list[str] = []
        self.ends_at = float("inf")
        self._lock = threading.Lock()

    def begins(self, call: str) -> bool:
        with self._lock:
            self.calls += 1
            self.trace.append(call)
            if self.calls == self.at:
                self.ends_at = time.monotonic() + FAULT_S
            return self.calls == self.at

    @property
    def lasts(self) -> bool:
        """Some faults last for a while, longer than the others wait for an answer."""
        return time.monotonic() < self.ends_at < float("inf")


class Life:
    """A transport, and the writes of a state, with a fault. `life`: of one courier; a killed one does nothing more."""

    def __init__(self, transport: Folder, fault: Fault) -> None:
        self._transport, self._fault = transport, fault
        self.is_dead = False
        self.is_silent = self.hears_no_mean = self.lists_nobody = False

    def meet(self, call: str, halfway: Callable[[], object] = lambda: None) -> None:
        if self.is_dead:
            raise Killed
        if self._fault.is_of_host:
            return
        begins = self._fault.begins(call)
        kind = self._fault.kind
        if begins and kind in ("killed", "bytes lost", "gone"):
            halfway()
            self.is_dead = True
            raise Killed
        if kind == "stopped":
            while self._fault.lasts:
                time.sleep(0.01)  # The fault itself: all threads of the courier stand still until it is over.
        if kind == "full disk" and self._fault.lasts and not call.startswith("fetch"):
            raise OSError(28, "No space left on device")
        if kind == "cut off" and self._fault.lasts and call.startswith("fetch"):
            raise Absent("the network is cut", is_gone=True)
        if kind == "slow" and self._fault.lasts and call.startswith(("fetch", "publish")):
            time.sleep(0.3)  # The fault itself: half of the time after which a peer counts as gone.

    def publish(self, key: str, value: bytes | None) -> None:
        if self.is_silent and key != "record":
            return
        self.meet(f"publish {key}", lambda: self._transport.publish(key, value))
        if self._fault.kind == "corrupt" and self._fault.lasts and value:
            value = value[:-1] + bytes([value[-1] ^ 1])
        self._transport.publish(key, value)

    def fetch(self, key: str, peer: str, deadline: float, known: bytes | None = None) -> bytes:
        self.meet(f"fetch {key} of {peer}")
        if self.hears_no_mean and "/mean" in key and peer != "p2":
            raise Absent("the mean was lost with a courier")
        value = self._transport.fetch(key, peer, deadline, known)
        if self.is_dead:
            raise Killed
        return value

    def peers(self) -> set[str]:
        if self.lists_nobody:
            raise OSError(107, "Transport endpoint is not connected")
        return self._transport.peers()

    def places(self) -> dict[str, str]:
        return {}

    def address(self) -> str:
        return self._transport.address()

    def close(self) -> None:
        self._transport.close()


class Host:
    """What DiLoCo is for its courier: offers a change when it may, merges what comes, replaces a courier that ended."""

    def __init__(self, swarm: Swarm, index: int, fault: Fault) -> None:
        self.swarm, self.index, self.fault = swarm, index, fault
        self.peer = f"p{index}"
        options = {
            "kind": "float32",
            "bound": None,
            "min_peers": 2,
            "fragment_s": 5.0,
            "shapes": SHAPES,
            "wanted": WANTED,
        }
        texts = {"run": "run", "place": str(swarm.folder), "secret": "secret", "listen": "", "advertise": ""}
        self.settings = Settings(self.peer, **texts, **options, optimizer=cloudpickle.dumps(descent))  # type: ignore[arg-type]
        self.state_fd = make_memfd("state", 0)
        self.numbers_fd = make_memfd("numbers", 8 * sum(SIZES))
        self.numbers = Numbers(self.numbers_fd, SIZES)
        self.given_fd = make_memfd("given", Given.BYTES)
        self.given = Given(self.given_fd)
        self.given.add(0, WANTED, FIRST)
        self.since = self.used = 0
        self.counts: dict[str, float] = {}
        self.status = Status()
        self.merged: list[object] | None = None
        self.offered: list[object] | None = None
        self.warnings: list[str] = []
        self.starts = 0
        self.is_gone = False
        self.is_busy = False  # Its steps take so long that it offers nothing.
        self.start()

    def start(self) -> None:
        self.starts += 1
        ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.channel = Channel(ends[0])
        self.courier: Courier | None = None
        if self.fault.kind == "bytes lost" and self.starts > 1:  # As with HTTP: the courier had them.
            shutil.rmtree(self.swarm.folder / "run" / self.peer, ignore_errors=True)
        self.life = Life(Folder(self.swarm.folder, "run", self.peer), self.fault)
        self.thread = threading.Thread(target=self._run, args=(ends[1],), daemon=True)
        self.thread.start()
        self.tell(merged=self.merged, used=self.used, is_first=True)
        if self.offered is not None:
            self.tell(offer=self.offered, **self.counts)

    def _run(self, end: socket.socket) -> None:
        own.life = self.life
        try:
            self.courier = Courier(self.settings, Channel(end), self.numbers, self.given, self.state_fd)
            self.courier.run()
        except Killed:
            pass
        finally:
            own.life.is_dead = True
            end.shutdown(socket.SHUT_RDWR)
            end.close()

    def meet(self, call: str) -> None:
        if self.fault.is_of_host and self.fault.begins(call) and self.fault.kind == "host gone":
            raise Killed

    def act(self) -> None:
        if self.fault.is_of_host and self.fault.lasts:
            return  # The fault itself: it is stopped.
        try:
            self._act()
        except Killed:  # With it the kernel kills its courier.
            self.life.is_dead = self.is_gone = True
            self.channel.close()
            self.thread.join(BOUND_S)

    def _act(self) -> None:
        try:
            while (message := self.channel.receive(may_wait=False)) is not None:
                self.hear(message)
        except EOFError:
            self.channel.close()
            self.thread.join(BOUND_S)
            self.is_gone = self.fault.kind == "gone"
            if not self.is_gone:
                self.start()
            return
        stands = [self.status.lineage, self.status.round]
        given = self.given.ranges()
        elements = [(element, each.number != AGAIN) for each in given for element in range(each.begin, each.end)]
        if not (has_elements := len(elements) >= self.used + STEP):
            self.given.reader = len(given), 0
        if (
            self.status.is_ready
            and self.merged == stands
            and self.offered != stands
            and has_elements
            and not self.is_busy
        ):
            self.numbers.change(self.status.blocks).fill_(change_of(self.index, self.status.round + 1))
            self.offered = stands
            self.swarm.used[self.peer, (self.status.lineage, self.status.round + 1)] = [
                element for element, is_new in elements[self.used : self.used + STEP] if is_new
            ]
            self.used += STEP
            self.counts = {"weight": 1.0, "since": self.since, "used": self.used}
            self.since = self.used
            self.tell(offer=stands, **self.counts)

    def hear(self, message: dict[str, Any]) -> None:
        assert "failed" not in message, message
        self.meet(f"hear {sorted(message)}")
        if "warning" in message:
            self.warnings.append(message["warning"])
        if "status" in message:
            self.status = Status(**{**message["status"], "blocks": tuple(message["status"]["blocks"])})
            self.swarm.note(self)
        if "merge" in message:
            self.merged = message["stands"]
            if self.offered != self.merged:
                self.offered = None
            if message["merge"] and not any(took_part for _, took_part in message["merge"]):
                self.since = self.used
            self.tell(merged=self.merged, used=self.used)

    def tell(self, **message: object) -> None:
        self.meet(f"tell {sorted(message)}")
        with contextlib.suppress(OSError):  # act() sees that the courier has ended.
            self.channel.send(**message)


def change_of(index: int, number: int) -> float:
    """What a peer offers to a round: in a sum of several each is a bit of its own."""
    return 2.0 ** -(3 * (number % 5) + index)


class Swarm:
    """Three peers. The first one has the fault."""

    def __init__(self, folder: pathlib.Path, fault: Fault) -> None:
        self.folder, self.kind = folder, fault.kind
        self.digests: dict[tuple[str, int], str] | None = {}  # None: they may differ.
        self.members: dict[tuple[str, int], dict[str, float]] = {}  # With their weights.
        self.used: dict[tuple[str, tuple[str, int]], list[int]] = {}  # By a peer, and a lineage's round.
        self.hosts = [Host(self, index, fault if index == 0 else Fault("none", 0)) for index in range(3)]

    def note(self, host: Host) -> None:
        """What is known of a round is the same for all peers."""
        status, place = host.status, (host.status.lineage, host.status.round)
        if self.digests is not None:
            known = self.digests.setdefault(place, status.digest)
            assert known == status.digest, f"another digest of {host.peer}: {place}"
        if host.courier is not None:
            last = host.courier._agreement.record.committed[1]
            key, members = (last.lineage, last.number), dict(zip(last.members, last.weights, strict=True))
            assert self.members.setdefault(key, members) == members, f"round {key} was decided twice"

    @property
    def living(self) -> list[Host]:
        return [host for host in self.hosts if not host.is_gone]

    def until(self, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + BOUND_S
        while not holds():
            assert time.monotonic() < deadline, self.report()
            for host in self.living:
                host.act()
            threads = [host.channel.fileno() for host in self.living]
            select.select(threads, [], [], 0.02)

    def report(self) -> str:
        return "\n".join(
            f"{host.peer}: {host.starts} starts, {host.status}, {host.merged}, {host.offered}, {host.warnings}, "
            f"{host.courier._agreement.record if host.courier is not None else None}"
            for host in self.hosts
        )

    def history(self) -> list[tuple[tuple[str, int], dict[str, float]]]:
        """The rounds that were made, without those of a lineage that has ended."""
        rounds, place = [], self.hosts[1].status.lineage
        for number in range(self.hosts[1].status.round, 0, -1):
            while (place, number) not in self.members:  # It was made before a split.
                place = place.rpartition("/")[0]
            rounds.append(((place, number), self.members[place, number]))
        return rounds[::-1]

    def expected(self) -> float:
        """The outer parameters after the rounds that were made."""
        value = torch.zeros(1)
        for (_, number), members in self.history():
            total = torch.zeros(1)
            for member, weight in members.items():
                total += weight * change_of(int(member[1:]), number)
            value -= total / (sum(members.values()) or 1)
        return float(value)

    def rest(self, number: int) -> None:
        """Until all who live have made a round after that one in which each took part, and no other is under way."""
        self.until(
            lambda: any(
                host.status.round > number and host.status.participants == len(self.living) for host in self.living
            )
        )
        for host in self.living:
            host.is_busy = True
        self.until(lambda: sum(host.offered is not None for host in self.living) < 2 and self.is_together())

    def is_together(self) -> bool:
        first = [self.living[0].status.lineage, self.living[0].status.round]
        return all(host.merged == [host.status.lineage, host.status.round] == first for host in self.living)

    def check_after(self, number: int) -> None:
        """Outer parameters have each change of each round once, and no change has elements of another one."""
        self.rest(number)
        for host in self.living:
            for index in range(len(SHAPES)):
                assert set(host.numbers.outer(index).tolist()) == {self.expected()}
        used = [
            element
            for place, members in self.history()
            for member, weight in members.items()
            if weight > 0
            for element in self.used[member, place]
        ]
        assert len(set(used)) == len(used)

    def close(self) -> None:
        for host in self.living:
            host.channel.close()
        for host in self.hosts:
            host.thread.join(BOUND_S)
            if host.courier is not None and host.courier._exchange is not None:
                host.courier._exchange.is_cancelled = True  # A process would end here, with all its threads.
            os.close(host.state_fd)
            os.close(host.numbers_fd)
            os.close(host.given_fd)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Couriers are threads with lives, and wait a tenth of what they wait elsewhere."""
    write = _state._write_all

    def write_all(fd: int, data: bytes, place: int) -> None:
        own.life.meet(f"write {len(data)} bytes", lambda: write(fd, data[: len(data) // 2], place))
        write(fd, data, place)

    monkeypatch.setattr(
        _courier, "transport_of", lambda settings, _: Sealed(own.life, settings.peer, settings.run, settings.secret)
    )
    monkeypatch.setattr(_state, "_write_all", write_all)
    for module, name, seconds in (
        (_courier, "TICK_S", 0.01),
        *((module, "BEAT_S", 0.1) for module in (_courier, _hearing)),
        (_hearing, "SILENCE_S", 0.6),
        (_courier, "GO_ON_S", 1.2),
        (_exchange, "POLL_S", 0.1),
        (_exchange, "AGAIN_S", 0.02),
        (_pace, "FIRST_OFFERS_S", 1.0),
        (_pace, "FIRST_ATTEMPT_S", 5.0),
    ):
        monkeypatch.setattr(module, name, seconds)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        thread.join(BOUND_S)
        assert not thread.is_alive(), "".join(traceback.format_stack(sys._current_frames()[thread.ident]))


def rounds_with(fault: Fault, folder: pathlib.Path) -> None:
    """Four rounds and more, until all who live have made one together after the fault."""
    swarm = Swarm(folder, fault)
    try:
        swarm.until(lambda: all(host.status.round >= 4 for host in swarm.living))
        swarm.until(lambda: not fault.lasts)
        swarm.check_after(max(host.status.round for host in swarm.living))
    finally:
        swarm.close()


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(
    "kind",
    ["killed", "bytes lost", "gone", "stopped", "full disk", "cut off", "slow", "corrupt", "host gone", "host stopped"],
)
@pytest.mark.usefixtures("quick")
def test_rounds_count_once_with_a_fault_anywhere(kind: str, seed: int, tmp_path: pathlib.Path) -> None:
    # The first call that a host counts is after those of its making.
    calls = range(3, 40) if kind.startswith("host") else range(1, 150)
    fault = Fault(kind, random.Random(f"{kind} {seed}").choice(calls))
    try:
        rounds_with(fault, tmp_path)
    except BaseException:
        print(f"{kind} at call {fault.at}:", *fault.trace[: fault.at + 1], sep="\n")
        raise
    assert fault.calls >= fault.at


@contextlib.contextmanager
def three_peers(tmp_path: pathlib.Path) -> Iterator[Swarm]:
    """Without a fault, after two rounds of all three."""
    swarm = Swarm(tmp_path, Fault("none", 0))
    try:
        swarm.until(lambda: all(host.status.round >= 2 and host.status.participants == 3 for host in swarm.hosts))
        yield swarm
    finally:
        swarm.close()


@pytest.mark.usefixtures("quick")
def test_a_peer_whose_outer_parameters_differ_takes_those_of_the_others(tmp_path: pathlib.Path) -> None:
    with three_peers(tmp_path) as swarm:
        swarm.digests = None
        assert swarm.hosts[0].courier is not None
        swarm.hosts[0].courier._state.parameters[0][7] += 1  # As by bad memory.
        swarm.until(lambda: "p0 has another digest" in "".join(swarm.hosts[1].warnings))
        swarm.check_after(max(host.status.round for host in swarm.hosts))


@pytest.mark.usefixtures("quick")
def test_who_joins_gets_its_state_from_several_peers(tmp_path: pathlib.Path) -> None:
    with three_peers(tmp_path) as swarm:
        asked = Fault("none", 0)
        for host in swarm.hosts:
            host.is_busy = True  # Rounds would go on, and not all peers always be at the same one.
        swarm.until(lambda: all(host.offered is None for host in swarm.hosts))
        swarm.hosts.append(Host(swarm, 3, asked))
        swarm.until(lambda: swarm.hosts[3].status.round == swarm.hosts[0].status.round)
        donors = {call.split()[-1] for call in asked.trace if call.startswith("fetch block/")}
        assert len(donors) == len(SHAPES)
        for host in swarm.hosts:
            host.is_busy = False
        swarm.check_after(swarm.hosts[3].status.round)
        assert swarm.hosts[0].status.total_weight == sum(sum(members.values()) for members in swarm.members.values())


@pytest.mark.usefixtures("quick")
def test_rounds_go_on_without_the_changes_of_a_slow_peer(tmp_path: pathlib.Path) -> None:
    with three_peers(tmp_path) as swarm:
        swarm.hosts[2].is_busy = True
        last = max(host.status.round for host in swarm.hosts)
        swarm.until(lambda: all(host.status.round > last + 3 for host in swarm.hosts))
        assert {host.status.participants for host in swarm.hosts} == {2}
        swarm.hosts[2].is_busy = False
        swarm.check_after(max(host.status.round for host in swarm.hosts))


@pytest.mark.usefixtures("quick")
def test_rounds_go_on_without_a_peer_whose_bytes_do_not_come(tmp_path: pathlib.Path) -> None:
    """It lives, and says so. Rounds were tried with it for ever."""
    with three_peers(tmp_path) as swarm:
        for host in swarm.hosts:
            assert host.courier is not None
            host.courier._pace._attempts = _pace.Times(0.5, 0.5)
        swarm.hosts[2].life.is_silent = True
        last = max(host.status.round for host in swarm.hosts)
        swarm.until(lambda: all(host.status.round > last + 3 for host in swarm.hosts[:2]))
        assert {host.status.participants for host in swarm.hosts[:2]} == {2}
        swarm.hosts[2].life.is_silent = False
        swarm.check_after(max(host.status.round for host in swarm.hosts))


@pytest.mark.usefixtures("quick")
def test_a_peer_takes_the_state_if_nobody_has_the_mean_of_the_last_round_any_more(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_courier, "CARRY_S", 0.5)
    with three_peers(tmp_path) as swarm:
        first, second, behind = swarm.hosts
        behind.life.hears_no_mean = True
        last = max(host.status.round for host in swarm.hosts)
        swarm.until(lambda: all(host.status.round > last for host in (first, second)))
        first.is_busy = second.is_busy = True  # No round follows by which it could see that it is behind.
        swarm.until(lambda: behind.status.round == first.status.round == second.status.round)
        behind.life.hears_no_mean = first.is_busy = second.is_busy = False
        swarm.check_after(max(host.status.round for host in swarm.hosts))


@pytest.mark.usefixtures("quick")
def test_a_folder_that_is_away_for_a_moment_is_heard_again(tmp_path: pathlib.Path) -> None:
    with three_peers(tmp_path) as swarm:
        lives = [host.life for host in swarm.hosts]
        couriers = [host.courier for host in swarm.hosts if host.courier is not None]
        for life in lives:
            life.lists_nobody = True
        swarm.until(lambda: not any(courier._hearing._followed for courier in couriers))
        for life in lives:
            life.lists_nobody = False
        swarm.check_after(max(host.status.round for host in swarm.hosts))


@pytest.mark.usefixtures("quick")
def test_a_round_that_one_courier_has_accepted_goes_on_when_it_was_killed_and_others_are_gone(
    tmp_path: pathlib.Path,
) -> None:
    """Nobody else had the mean, and what one member had changed was lost with it: no other round could follow."""
    with three_peers(tmp_path) as swarm:
        first, second, third = swarm.hosts
        second.life.hears_no_mean = True
        swarm.until(
            lambda: (
                first.courier is not None
                and (accepted := first.courier._agreement.record.accepted) is not None
                and third.courier is not None
                and third.courier._agreement.record.accepted == accepted
            )
        )
        third.life.is_dead = first.life.is_dead = third.is_gone = True
        first.fault.kind = "bytes lost"
        shutil.rmtree(tmp_path / "run" / "p2", ignore_errors=True)
        second.life.hears_no_mean = False
        swarm.check_after(max(host.status.round for host in swarm.living))


@pytest.mark.usefixtures("quick")
def test_a_courier_that_takes_over_merges_the_blocks_of_the_last_round_alone(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was changed in the others is in no round yet."""

    def next_blocks(pace: _pace.Pace) -> tuple[int, int]:
        first = pace._agreement.record.round % 2
        return first, first + 1

    monkeypatch.setattr(_pace.Pace, "next_blocks", next_blocks)
    with three_peers(tmp_path) as swarm:
        courier = swarm.hosts[0].courier
        assert courier is not None
    for host in swarm.hosts:
        assert not host.thread.is_alive()
    record = courier._agreement.record
    blocks = record.committed[1].blocks
    assert blocks[1] - blocks[0] == 1
    courier._dirty = {}
    courier._told({"merged": [record.lineage, record.round - 1], "used": 0, "is_first": True})
    assert courier._dirty == {blocks[0]: True}


@pytest.mark.usefixtures("quick")
def test_of_a_peer_that_has_left_nothing_stays(tmp_path: pathlib.Path) -> None:
    with three_peers(tmp_path) as swarm:
        swarm.hosts[0].channel.close()
        swarm.hosts[0].is_gone = True
        couriers = [host.courier for host in swarm.living if host.courier is not None]
        swarm.until(lambda: all("p0" not in courier._hearing._followed for courier in couriers))
        assert all("p0" not in {*courier._agreement.heard, *courier._hearing._heard_at} for courier in couriers)
        swarm.check_after(max(host.status.round for host in swarm.living))
