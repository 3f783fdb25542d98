"""Three couriers of accelmgr.outer, and hosts that do what DiLoCo does, with a fault at one place.

The couriers are threads of this process. Each change that a host offers is one power of two, so outer parameters tell
which changes they have, how often, and whether one is missing that a round says it has.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import select
import shutil
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import cloudpickle
import torch

from accelmgr._memory.memfd import make_memfd
from accelmgr.outer._channel import Channel, Given, Numbers, Status
from accelmgr.outer._courier import Courier
from accelmgr.outer._folder import Folder
from accelmgr.outer._leases import AGAIN, FIRST
from accelmgr.outer._settings import Settings
from accelmgr.outer._transport import Absent

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
        self.hears_records = threading.Event()
        self.hears_records.set()

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
        if key == "record" and not self.hears_records.is_set():
            self.hears_records.wait(BOUND_S)
            raise Absent("it was lost")
        if self.is_dead:
            raise Killed
        return value

    def peers(self) -> set[str]:
        if self.lists_nobody:
            raise OSError(107, "Transport endpoint is not connected")
        return self._transport.peers()

    def places(self) -> dict[str, str]:
        return {}

    def trouble(self) -> str:
        return ""

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
            "payload": "float32",
            "bound": None,
            "min_peers": 2,
            "fragment_s": 5.0,
            "shapes": SHAPES,
            "wanted": WANTED,
            "first_round": 0,
        }
        texts = {"swarm": f"run@{swarm.folder}", "secret": "secret", "listen": "", "advertise": ""}
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
