# Runs in: the host.
"""The host's side of rounds between machines."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import subprocess
import sys
import time
import uuid
import weakref
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

import cloudpickle
import torch

from accelmgr import _native
from accelmgr._memory.memfd import make_memfd
from accelmgr.errors import ConfigError, SessionError, UsageError
from accelmgr.manager import Manager
from accelmgr.outer._channel import Channel, Given, Numbers, Status
from accelmgr.outer._record import MOST_WEIGHT
from accelmgr.outer._saved import begin_with, check, saved
from accelmgr.outer._settings import Settings, require
from accelmgr.outer.leased import Leased

logger = logging.getLogger("accelmgr")

Optimizer = Callable[[list[torch.Tensor]], torch.optim.Optimizer]
RESTART_S = 1.0
"""The least time between two starts of a courier."""
HANG_S = 300.0
"""A courier that has said nothing for so long is killed, and another one goes on."""
SAVE_S = 60.0
_PROGRAM = """import sys
sys.path[:] = {path!r}
from accelmgr.outer._courier import main
main(sys.argv[1:])
"""


def nesterov(parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    """The outer optimizer of DiLoCo."""
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


class _Courier:
    """The process, and this end of its socket."""

    def __init__(self, fds: tuple[int, ...]) -> None:
        """fds: of settings, numbers, given elements and state."""
        own, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        settings, *others = fds
        program = _PROGRAM.format(path=[os.path.abspath(entry) for entry in sys.path])
        passed = [settings, its.fileno(), *others]
        command = [sys.executable, "-c", program, str(os.getpid()), *map(str, passed)]
        self.channel = Channel(own)
        with its:
            self.process = subprocess.Popen(command, pass_fds=passed, stdin=subprocess.DEVNULL)

    def end(self) -> None:
        """The courier ends when its socket closes; it is killed if that takes 2 s."""
        self.channel.close()
        try:
            self.process.wait(2)
        except subprocess.TimeoutExpired:
            self.process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # It waits in the kernel, for a folder for instance.
                self.process.wait(2)


class DiLoCo:
    """Averages what machines have changed in `every` steps, and lets an outer optimizer apply the mean.

    manager: of this machine, which is one peer, however many runners it has.
    swarm: `RUN@PLACE`. Peers with the same RUN and secret are one swarm. PLACE is `HOST:PORT` of a peer that the others
        reach, an address of IPv6 in brackets (the first one that can serves there; several, separated by commas, if one
        may be gone), or a folder that all see (`run-7@/mnt/shared`), or a multiaddr of a peer
        (`run-7@/ip4/203.0.113.1/tcp/31337/p2p/Qm...`; several, separated by commas), whose `address` is just that: then
        hivemind's network carries the bytes, encrypted, also to peers behind routers, and `run-7@p2p` begins such a
        swarm. After it has joined, a peer needs no particular other one.
    every: inner steps from one average of a parameter to its next one.
    fragment_s: a round averages as many parameters as the link carries in about so many seconds: over a fast link all;
        over a slow one a part, and the next round the part after it. A part with a tenth of all numbers is due
        after a tenth of `every` steps, and each part after at least one.
    optimizer: makes the outer optimizer of a list of float32 tensors, in the courier; None: SGD with rate 0.7 and
        Nesterov momentum 0.9. It has all of them, and keeps at most three tensors for each one.
    mix: how much of the outer parameters a merge takes: 1.0 replaces the inner ones.
    payload: how changes travel: `int8`, `int4` (both by blocks of 256) or `float32`.
    weight: what a step adds to the weight of this peer's change; None: its samples.
    min_peers: the least members of a round. When no majority of the swarm has answered for half a minute, so
        many peers go on without the others. Two halves of a divided swarm may both go on then; when they meet, the one
        with less work in its rounds (`total_weight`) takes over the other's state. More than half of the swarm: only
        one half goes on.
    bound: a change whose norm is more than so many times the median is scaled down; None: it is not. Each member of a
        round compares norms in the part that it reduces.
    secret: lets peers in. Values are signed with it; only hivemind's network encrypts them.
    data: the manager's dataset, if the swarm leases elements to this peer.
    state: what state_dict() of any peer of a swarm that has ended has returned: outer parameters, the outer optimizer's
        state, `round` and `total_weight` go on there, and the model's parameters become the outer ones. Who has none,
        or an older one, takes the state of those that have the newest.
    listen, advertise: HOST:PORT to serve at (for a name of this machine at all of its addresses), and that others reach
        this peer at, where that differs (NAT); with hivemind's network multiaddrs without the name of the peer
        (`/ip4/0.0.0.0/tcp/31337`).

    A round counts once or not at all: members, weights and mean are agreed on by a majority of the peers that answered
    in the round before it, and each commits it in one piece. A peer that dies, hangs or is late is left out, and takes
    the state of the others when it comes back; its inner parameters and their optimizer stay. Buffers are not averaged.

    Source: Douillard et al., "DiLoCo", 2023; "Streaming DiLoCo with overlapping communication", 2025 (`mix`).

    The courier is a process of its own; another one takes its place when it dies or says nothing for five minutes. Each
    DiLoCo has a new name in the swarm, so a machine that starts again is another peer.

    One thread at a time. Raises ConfigError for arguments that cannot be, such as the state of another model or of
    another outer optimizer; UsageError before the manager's start.
    """

    def __init__(
        self,
        manager: Manager,
        swarm: str,
        every: int,
        optimizer: Optimizer | None = None,
        *,
        mix: float = 0.5,
        payload: str = "int8",
        weight: Callable[[_native.StepResult], float] | None = None,
        min_peers: int = 2,
        bound: float | None = 10.0,
        fragment_s: float = 5.0,
        secret: str = "",
        listen: str = "",
        advertise: str = "",
        data: Leased | None = None,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        named = manager.named_parameters()  # Raises UsageError before the start: then they have other memory.
        require("every", every, every >= 1, "at least 1")
        require("mix", mix, 0 < mix <= 1, "more than 0 and at most 1")
        for name, function in (("optimizer", optimizer), ("weight", weight)):
            require(name, type(function).__name__, function is None or callable(function), "a function")
        leased = getattr(manager._dataset, "dataset", manager._dataset)  # Of a DataLoader, for instance.
        is_right = isinstance(data, Leased) if data is not None else not isinstance(leased, Leased)
        given = None if data is None else type(data).__name__
        require("data", given, is_right, "the Leased that the manager reads")
        self._manager, self._every, self._mix = manager, every, mix
        self._weight = weight or (lambda result: result.samples)
        self._parameters = [each for each in manager.parameters() if each.requires_grad]
        if not self._parameters:
            raise UsageError("DiLoCo(): the manager has no parameters that are trained")
        if any(each.is_complex() for each in self._parameters):
            raise ConfigError("DiLoCo() has no rounds for complex parameters", "manager")
        names = {each.data_ptr(): name for name, each in named if each.numel() > 0}
        frozen = [each for each in manager.parameters() if not each.requires_grad]
        self._frozen = [(names.get(each.data_ptr(), "an empty one"), each) for each in frozen]
        self._shapes = {
            names.get(each.data_ptr(), f"empty {index}"): tuple(each.shape)
            for index, each in enumerate(self._parameters)
        }
        if state is not None:
            check(state, self._shapes)
        if state is not None and data is not None and data.first != state["next_element"]:
            raise ConfigError(f"data begins at element {data.first}; make it with the same state", "data")
        self.peer = f"{socket.gethostname()}-{uuid.uuid4().hex[:8]}"
        settings = Settings(
            self.peer,
            swarm,
            secret,
            listen,
            advertise,
            payload,
            bound,
            min_peers,
            fragment_s,
            data.hold if data is not None else 0,
            state["round"] if state is not None else 0,
            list(self._shapes.values()),
            cloudpickle.dumps(optimizer or nesterov),
        )
        self._status = Status()
        self._merged: list[Any] | None = None
        self._offered: list[Any] | None = None
        self._pending: dict[str, Any] | None = None
        self._steps, self._sum = 0, 0.0
        self._was_left_out = False  # Its changes come too late, until one is due before others offer theirs.
        self._batch = self._since = self._used = 0  # Elements: of the last step; used before this change, and by now.
        self._offered_counts: dict[str, float] = {}
        self._due_steps = every  # For the blocks of the next round.
        sizes = [each.numel() for each in self._parameters]
        self._fds = (
            make_memfd("accelmgr-outer-settings", 0),
            make_memfd("accelmgr-outer-numbers", 8 * sum(sizes)),
            os.dup(data.fd) if data is not None else make_memfd("accelmgr-outer-leases", Given.BYTES),
            make_memfd("accelmgr-outer-state", 0),
        )
        self._holder: list[_Courier] = []
        self._host = os.getpid()
        self._closing = weakref.finalize(self, _close, self._host, self._holder, self._fds)
        with open(f"/proc/self/fd/{self._fds[0]}", "wb") as file:
            file.write(cloudpickle.dumps(settings))
        if state is not None:  # It may be refused: the model changes after it.
            begin_with(state, self._fds[3], self._shapes, optimizer or nesterov, self.peer, settings.wanted)
        manager.sync()
        if state is not None:
            with torch.no_grad(), manager.writing():
                for name, parameter in zip(self._shapes, self._parameters, strict=True):
                    parameter.copy_(state["parameters"][name])
        self._base = [each.detach().to(torch.float32, copy=True) for each in self._parameters]
        self._numbers = Numbers(self._fds[1], sizes)
        for index, value in enumerate(self._base):
            self._numbers.outer(index).copy_(value.flatten())
        self._started_at = self._heard_at = 0.0
        self._broke_in = 0  # The round in which the outer optimizer has failed last.
        self._start()

    # The courier

    def _start(self) -> None:
        self._started_at = self._heard_at = time.monotonic()
        self._holder[:] = [_Courier(self._fds)]
        self._send(merged=self._merged, used=self._used, is_first=True)
        if self._offered is not None:  # The last one may have died before it read that.
            self._send(offer=self._offered, **self._offered_counts)

    @property
    def courier_pid(self) -> int:
        """The process beside this one; another one takes its place when it dies."""
        return self._courier().process.pid

    def _courier(self) -> _Courier:
        if os.getpid() != self._host:
            raise UsageError(f"DiLoCo: it was used in a forked child; it belongs to process {self._host}")
        if not self._holder:
            raise UsageError("DiLoCo: it was closed")
        return self._holder[0]

    def _send(self, **message: Any) -> None:
        with contextlib.suppress(OSError):  # It has died; _receive() sees that.
            self._courier().channel.send(**message)

    def _receive(self) -> None:
        courier, has_ended = self._courier(), False
        try:
            while (message := courier.channel.receive(may_wait=False)) is not None:
                self._heard_at = time.monotonic()
                self._hear(message)
        except EOFError:
            has_ended = True
        now = time.monotonic()
        if now - self._heard_at > HANG_S:
            courier.process.kill()
        elif not has_ended or now - self._started_at < RESTART_S:
            return
        courier.end()
        logger.warning("outer: the courier ended (%s); another one goes on", courier.process.returncode)
        self._pending = None
        try:
            self._start()
        except OSError as error:
            logger.warning("outer: another courier cannot start: %s", error)

    def _hear(self, message: dict[str, Any]) -> None:
        if "failed" in message and self._status == Status():
            self.close()
            raise SessionError(f"DiLoCo: the courier cannot start: {message['failed']}")
        if "failed" in message:  # Another one could: it is tried again.
            logger.warning("outer: another courier cannot start: %s", message["failed"])
        if "broke" in message:  # Once may be for want of memory: another courier tries it.
            number, text = message["broke"]
            if number == self._broke_in:
                self.close()
                raise SessionError(f"DiLoCo: round {number} cannot be made: {text}")
            self._broke_in = number
        if "status" in message:
            fields = message["status"]
            self._status = Status(**{**fields, "blocks": tuple(fields["blocks"])})
            numbers = [value.numel() for value in self._base]
            self._due_steps = max(1, round(self._every * sum(numbers[slice(*self._status.blocks)]) / sum(numbers)))
        if "merge" in message:
            self._pending = message
        if "warning" in message:
            logger.warning("outer: %s", message["warning"])

    # Steps

    def step(self, *results: _native.StepResult) -> None:
        """Call it after each step, or with all results of begin_steps(). It merges what has come, and offers a change
        when `every` steps were made.

        A peer that a round has left out, for instance because its steps take longer, offers what it has when others do.

        It never waits for another peer. Raises UsageError: `weight` has returned no weight, or a parameter is trained
        now that was frozen when this DiLoCo was made: rounds would leave it out. Raises SessionError: the
        courier cannot start, for instance because `listen` is no address of this machine, or the outer optimizer has
        failed twice in the same round. With inner steps it calls manager.sync() when there is something to merge or to
        offer.
        """
        for result in results:
            if result.counted:
                weight = float(self._weight(result))
                if not 0 <= weight <= MOST_WEIGHT:
                    raise UsageError(f"DiLoCo: the weight of a step is {weight}; it must be from 0 to {MOST_WEIGHT:g}")
                self._steps += 1
                self._sum += weight
            self._batch = result.samples or self._batch
            self._used += self._batch * (result.skipped + result.counted)
        self._receive()
        self._act()

    def _act(self) -> None:
        is_due = self._is_due()
        if self._pending is None and not is_due:
            return
        self._manager.sync()
        if self._pending is not None:
            self._merge(self._pending)
        if is_due and self._is_due():
            self._offer()

    def _is_due(self) -> bool:
        offers_with_others = self._was_left_out and self._status.is_awaited and self._sum > 0
        is_due = self._steps >= self._due_steps or offers_with_others
        return is_due and self._stands() and self._offered != self._merged

    def _stands(self) -> bool:
        """Whether what was merged last is what the courier has said that it has: a change may be offered to that."""
        return self._status.is_ready and self._merged == [self._status.lineage, self._status.round]

    @torch.no_grad()
    def _merge(self, message: dict[str, Any]) -> None:
        replaces = message["replaces"]
        with self._manager.writing():
            for index, took_part in message["merge"]:
                parameter, base = self._parameters[index].detach(), self._base[index]
                outer = merged = self._numbers.outer(index).view(base.shape)
                has_16_bits = parameter.dtype.itemsize == 2
                if not replaces and self._mix < 1:
                    inner = parameter.float() if has_16_bits else parameter
                    merged = inner.lerp_(outer.to(inner.dtype), self._mix)
                parameter.copy_(merged)
                # What was changed in a round that went without this peer is dropped: the next change begins here.
                base.copy_(outer if took_part or replaces else parameter)
                if has_16_bits and (took_part or replaces):
                    base.add_(parameter.float() - merged)  # What the parameter has lost is no change.
        self._merged, self._pending = message["stands"], None
        if message["merge"] and not any(took_part for _, took_part in message["merge"]):
            self._steps, self._sum, self._since, self._was_left_out = 0, 0.0, self._used, True
        if self._offered is not None and self._offered != self._merged:
            if not message["merge"]:  # The swarm was divided: what was offered is in no round, and is offered again.
                self._sum, self._since = self._sum + self._offered_counts["weight"], int(self._offered_counts["since"])
                self._steps = max(self._steps, self._due_steps)
            self._offered = None
        self._send(merged=self._merged, used=self._used)

    @torch.no_grad()
    def _offer(self) -> None:
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise UsageError(f"DiLoCo: '{name}' is trained now, and was not when this was made; make another one")
        blocks = self._status.blocks
        change, begin = self._numbers.change(blocks), 0
        for parameter, base in zip(self._parameters[slice(*blocks)], self._base[slice(*blocks)], strict=True):
            torch.sub(base, parameter.detach().float(), out=change[begin : begin + base.numel()].view(base.shape))
            begin += base.numel()
        self._offered = [self._status.lineage, self._status.round]
        self._offered_counts = {"weight": self._sum, "since": self._since, "used": self._used}
        self._send(offer=self._offered, **self._offered_counts)
        self._was_left_out = self._steps < self._due_steps
        self._steps, self._sum, self._since = 0, 0.0, self._used

    def wait(self, timeout: float) -> bool:
        """Blocks until the change that was offered last is in a round and merged, or was left out.

        After each step() it makes DiLoCo synchronous. Returns False if `timeout` seconds have passed before.
        """
        deadline = time.monotonic() + timeout
        while True:
            self._receive()
            if self._pending is not None:
                self._act()
            if self._offered is None and self._stands():
                return True
            if (left := deadline - time.monotonic()) <= 0:
                return False
            news = select.poll()
            if (end := self._courier().channel.fileno()) >= 0:
                news.register(end, select.POLLIN)
            news.poll(1000 * min(left, RESTART_S))

    # What is known

    @property
    def round(self) -> int:
        """How many outer steps the swarm has made, as far as this peer knows; see `min_peers` for when it falls."""
        return self._status.round

    @property
    def participants(self) -> int:
        """Peers whose changes are in the last round."""
        return self._status.participants

    @property
    def total_weight(self) -> float:
        """The weights of all changes that rounds have had, samples by default: the same in all peers after a round.

        Learning rates may follow it, or `round`: `LambdaLR(inner, lambda _: min(1, outer.total_weight / 1e6))`.
        """
        return self._status.total_weight

    @property
    def digest(self) -> str:
        """SHA-256 of the outer parameters and their optimizer's state: the same in all peers after a round."""
        return self._status.digest

    @property
    def waiting_for(self) -> str:
        """What the next round waits for; empty while one is under way."""
        return self._status.waiting_for

    @property
    def address(self) -> str:
        """How other peers name this one in their `swarm`, after `RUN@`; empty until the courier has started."""
        return self._status.address

    def state_dict(self) -> dict[str, Any]:
        """What a swarm needs to go on after all its machines have ended, for torch.save(); any peer has all of it.

        `parameters` are the outer ones, by name. Blocks while it reads and hashes all of it, and while the courier
        writes; raises SessionError if that takes a minute, UsageError after close().
        """
        self._courier()  # Raises UsageError after close().
        deadline = time.monotonic() + SAVE_S
        while (state := saved(self._fds[3], self._shapes)) is None:
            self._receive()
            if time.monotonic() > deadline:
                raise SessionError(f"DiLoCo.state_dict(): the courier has written no state for {SAVE_S:.0f} s")
            time.sleep(0.01)  # The courier is another process.
        return state

    def close(self) -> None:
        """Leaves the swarm, when peers that are about to have the last round have it, or after a second.

        Idempotent; does nothing in a forked child.
        """
        self._closing()

    def __enter__(self) -> DiLoCo:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _close(host: int, holder: list[_Courier], fds: tuple[int, ...]) -> None:
    if os.getpid() != host:  # A fork of the host ends.
        return
    for courier in holder:
        courier.end()
    holder.clear()
    for fd in fds:
        os.close(fd)
