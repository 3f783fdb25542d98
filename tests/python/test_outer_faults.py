"""Rounds of accelmgr.outer with a fault at each place."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import queue
import random
import shutil
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from faulty_peers import BOUND_S, SHAPES, Fault, Host, Swarm, descent, own

from accelmgr._memory.memfd import make_memfd
from accelmgr.outer import _courier, _exchange, _hearing, _pace, _state
from accelmgr.outer._agreement import Agreement
from accelmgr.outer._catching_up import CatchingUp
from accelmgr.outer._leases import Leases
from accelmgr.outer._record import Record, beginning
from accelmgr.outer._transport import Absent, Sealed


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
        (_hearing, "ANSWER_S", 0.3),
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
    courier._merges._blocks.clear()
    courier._told({"merged": [record.lineage, record.round - 1], "used": 0, "is_first": True})
    assert courier._merges._blocks == {blocks[0]: True}


@pytest.mark.usefixtures("quick")
def test_an_exchange_that_ends_after_its_round_leaves_the_mean_for_others(tmp_path: pathlib.Path) -> None:
    """It took it away. Peers that knew of the round waited two minutes for its mean, and were voters meanwhile."""
    with three_peers(tmp_path) as swarm:
        for host in swarm.hosts:
            host.is_busy = True
        swarm.until(lambda: all(host.offered is None for host in swarm.hosts) and swarm.is_together())
        courier, other = swarm.hosts[0].courier, swarm.hosts[1].courier
        assert courier is not None and other is not None
        decided = courier._agreement.record.committed
        name = f"{decided[1].key}/mean"
        mean = other._transport.fetch(name, "p0", time.monotonic())
        late = courier._exchange_of(decided[1])  # As if its bytes had come while another peer's mean was committed.
        courier._begin_round()
        courier._catching_up.keep(decided, mean)
        with pytest.raises(_exchange.Cancelled):
            late.publish_mean(mean)
        swarm.until(courier._events.empty)
        assert other._transport.fetch(name, "p0", time.monotonic()) == mean


@pytest.mark.usefixtures("quick")
def test_who_lacks_a_round_whose_mean_is_gone_takes_the_state_at_once(tmp_path: pathlib.Path) -> None:
    with three_peers(tmp_path) as swarm:
        first, second, behind = swarm.hosts
        behind.life.is_dead = True  # Another courier takes its place.
        last = max(host.status.round for host in swarm.hosts)
        behind.is_gone = True
        swarm.until(lambda: all(host.status.round >= last + 2 for host in (first, second)))
        for host in (first, second):
            assert host.courier is not None
            for _, key, _ in host.courier._catching_up._kept:
                host.courier._transport.publish(f"{key}/mean", None)
            host.is_busy = True
        behind.is_gone = False
        swarm.until(swarm.is_together)
        first.is_busy = second.is_busy = False
        swarm.check_after(max(host.status.round for host in swarm.hosts))


class Donors:
    """A transport by which some peers serve a state, of which `gone` end after their first blocks."""

    def __init__(self, state: _state.State, record: Record, gone: set[str]) -> None:
        self.hashes = list(state.hashes)
        self.blocks = {digest: state.block(index) for index, digest in enumerate(self.hashes)}
        self.snapshot = json.dumps({"hashes": self.hashes, **dataclasses.asdict(record)}).encode()
        self.gone, self.served = gone, list[tuple[str, str]]()

    def fetch(self, key: str, peer: str, deadline: float, known: bytes | None = None) -> bytes:
        if key.startswith("state/"):
            return self.snapshot
        if peer in self.gone:
            raise Absent(f"{peer} does not answer", is_gone=True)
        self.served.append((peer, key))
        return self.blocks[key.removeprefix("block/")]


@pytest.mark.parametrize("gone", ["a", "b", "ab"])
def test_what_one_donor_has_not_sent_comes_from_another(gone: str) -> None:
    """The first one was asked for all that others did not send; without it, all that had come was thrown away."""
    shapes = [(3,)] * 12
    fds = [make_memfd("state", 0) for _ in range(2)]
    theirs, mine = (
        _state.State(fd, shapes, lambda value=value: [torch.full((3,), value + i) for i in range(12)], descent)  # type: ignore[misc]
        for fd, value in zip(fds, (100.0, 200.0), strict=True)
    )
    leader = dataclasses.replace(beginning("a", Leases(), (0, 12), round=3, blocks=(0, 12)), digest=theirs.digest)
    agreement = Agreement(dataclasses.replace(beginning("me", Leases(), (0, 12), blocks=(0, 12)), digest=mine.digest))
    for peer in "abc":
        agreement.hear(dataclasses.replace(leader, peer=peer, version=1))
    donors, calls, taken = Donors(theirs, leader, set(gone)), queue.Queue[Any](), []
    catching_up = CatchingUp(
        agreement,
        mine,
        donors,  # type: ignore[arg-type]
        later=calls.put,
        commits=lambda *_: None,
        takes=lambda *arguments: taken.append(arguments),
        says=pytest.fail,
    )
    catching_up.follow(leader, {"a", "b", "c"})
    while catching_up.is_under_way:
        calls.get(timeout=BOUND_S)()
    assert len(taken) == 1 and len(donors.served) == 12
    for fd in fds:
        os.close(fd)


@pytest.mark.usefixtures("quick")
def test_who_joins_hears_all_before_it_follows_one(tmp_path: pathlib.Path) -> None:
    """It took the state of the first one that it heard, which may lack many rounds itself."""
    with three_peers(tmp_path) as swarm:
        hearing = swarm.hosts[0].courier and swarm.hosts[0].courier._hearing
        assert hearing and hearing.has_heard_all()
        del hearing._heard_at["p2"]
        hearing._followed["p2"] = time.monotonic()
        assert not hearing.has_heard_all()
        hearing._followed["p2"] -= 2 * _hearing.ANSWER_S
        assert hearing.has_heard_all()  # It may have been stopped.
        hearing._followed["p2"], hearing._gone = time.monotonic(), {"p2"}
        assert hearing.has_heard_all()
        for host in swarm.hosts:
            host.is_busy = True
        swarm.until(lambda: all(host.offered is None for host in swarm.hosts))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_hearing.Hearing, "has_heard_all", lambda _: False)
            asked = Fault("none", 0)
            swarm.hosts.append(Host(swarm, 3, asked))
            swarm.until(lambda: "the state of" in swarm.hosts[3].status.waiting_for)
            assert not any(call.startswith("fetch state/") for call in asked.trace)
        swarm.until(lambda: swarm.hosts[3].status.round == swarm.hosts[0].status.round)


@pytest.mark.usefixtures("quick")
def test_a_swarm_of_which_nobody_is_left_is_said_to_be_lost(tmp_path: pathlib.Path) -> None:
    """Those that had joined, and had not got its state yet, began anew without a word."""
    with three_peers(tmp_path) as swarm:
        old = list(swarm.hosts)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(CatchingUp, "follow", lambda *_: None)
            new = [Host(swarm, index, Fault("none", 0)) for index in (3, 4)]
            swarm.hosts += new
            swarm.until(lambda: all("the state of p" in host.status.waiting_for for host in new))
            for host in old:
                host.life.is_dead = host.is_gone = True
            swarm.until(lambda: all(not host.courier or host.courier._hearing.alive() <= {"p3", "p4"} for host in new))
        swarm.until(lambda: all(host.status.round > 0 for host in new))
        lost = "nobody who answers has the state of p"
        swarm.until(lambda: any(lost in warning for host in new for warning in host.warnings))


@pytest.mark.usefixtures("quick")
def test_who_leaves_after_a_round_of_two_tells_the_other_one_of_it(tmp_path: pathlib.Path) -> None:
    """Both had accepted it, one had heard that of the other, and ended: the other one was left without this round."""
    with three_peers(tmp_path) as swarm:
        first, second, third = swarm.hosts
        third.channel.close()
        third.is_gone = True
        assert first.courier is not None and second.courier is not None
        swarm.until(lambda: len(first.courier._agreement.record.voters) == 2)
        last = first.courier._agreement.record.round
        publish = second.courier._transport.publish

        def publish_and_hear_nothing(key: str, value: bytes | None) -> None:
            publish(key, value)
            if key == "record" and value is not None and Record.of_bytes(value).accepted is not None:
                second.life.hears_records.clear()
                first.life.hears_no_mean = False

        first.life.hears_no_mean = True  # It has the mean later than the second one, which does not hear of that.
        second.courier._transport.publish = publish_and_hear_nothing
        swarm.until(lambda: first.status.round > last)
        before = second.courier._agreement.record.round
        first.channel.close()
        first.is_gone = True
        first.thread.join(0.2)
        second.life.hears_records.set()
        swarm.until(lambda: second.status.round == first.status.round)
        assert before < second.status.round


@pytest.mark.usefixtures("quick")
def test_of_a_peer_that_has_left_nothing_stays(tmp_path: pathlib.Path) -> None:
    with three_peers(tmp_path) as swarm:
        swarm.hosts[0].channel.close()
        swarm.hosts[0].is_gone = True
        couriers = [host.courier for host in swarm.living if host.courier is not None]
        swarm.until(lambda: all("p0" not in courier._hearing._followed for courier in couriers))
        assert all("p0" not in {*courier._agreement.heard, *courier._hearing._heard_at} for courier in couriers)
        swarm.check_after(max(host.status.round for host in swarm.living))
