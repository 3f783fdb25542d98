"""Rounds of accelmgr.outer with a fault at each place."""

from __future__ import annotations

import contextlib
import pathlib
import random
import shutil
import sys
import threading
import traceback
from collections.abc import Iterator

import pytest
from faulty_peers import BOUND_S, SHAPES, Fault, Host, Swarm, own

from accelmgr.outer import _courier, _exchange, _hearing, _pace, _state
from accelmgr.outer._transport import Sealed


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
