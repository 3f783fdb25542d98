"""Rounds between machines: peers of this process, each with a manager, a runner and a courier."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import os
import pathlib
import select
import shutil
import signal
import socket
from typing import Any

import pytest
import torch
from launching import kill
from outer_peers import (
    BOUND_S,
    EVERY,
    WHOLE,
    Peer,
    all_ready,
    flat,
    make_round,
    make_round_of_all,
    meet,
    model_of,
    simulated,
    swarm_of,
    wait_until,
)

import accelmgr
import accelmgr.outer
from accelmgr.outer import diloco
from accelmgr.outer._record import Record


@pytest.fixture(params=["folder", "http"])
def place(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> str:
    if request.param == "folder":
        return f"run@{tmp_path}/swarm"
    host = "127.0.0.2"  # The first peer serves there alone, as on the address of a machine.
    with socket.create_server((host, 0)) as server:
        return f"run@{host}:{server.getsockname()[1]}"


@pytest.mark.parametrize("inner", [False, True], ids=["host_steps", "inner_steps"])
def test_rounds_are_those_of_the_algorithm(place: str, inner: bool) -> None:
    options = {"mix": 0.5, "payload": "float32", "inner": inner}
    with swarm_of(*(lambda peer=peer: Peer(peer, place, **options) for peer in range(3))) as peers:  # type: ignore[misc]
        meet(peers)
        for number in range(1, 4):
            assert make_round(peers) == number
            assert {each.outer.participants for each in peers} == {3}
            assert len({each.outer.digest for each in peers}) == 1
        for mine, expected in zip(peers, simulated([WHOLE] * 3, 3, 0.5), strict=True):
            for value, other in zip(mine.values(), expected, strict=True):
                torch.testing.assert_close(value, other, rtol=1e-5, atol=1e-6)


def test_steps_that_were_begun_at_once_are_in_one_change(tmp_path: pathlib.Path) -> None:
    options = {"mix": 0.5, "payload": "float32"}
    with swarm_of(*(lambda peer=peer: Peer(peer, f"run@{tmp_path}", **options) for peer in range(2))) as peers:  # type: ignore[misc]
        meet(peers)
        weight = 0
        for steps in (EVERY, 2 * EVERY):
            for each in peers:
                each.outer.step(*each.manager.begin_steps(steps, optimizer=each.optimizer).result())
            make_round(peers, 0)
            weight += 2 * 4 * steps
            assert peers[0].outer.total_weight == weight
        for mine, expected in zip(peers, simulated([WHOLE, (2 * EVERY, WHOLE[1])], 2, 0.5), strict=True):
            for value, other in zip(mine.values(), expected, strict=True):
                torch.testing.assert_close(value, other, rtol=1e-5, atol=1e-6)


def test_wait_ends_when_the_next_change_may_be_offered(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What says which blocks come next is a message after the round's values: without it a change came a step late."""
    with swarm_of(*(lambda peer=peer: Peer(peer, f"run@{tmp_path}") for peer in range(2))) as peers:  # type: ignore[misc]
        meet(peers)
        late = peers[0].outer
        held: list[dict[str, object]] = []
        hear = late._hear

        def hear_no_status(message: dict[str, object]) -> None:
            held.append(message) if "status" in message else hear(message)

        monkeypatch.setattr(late, "_hear", hear_no_status)
        for _ in range(EVERY):
            for each in peers:
                each.step()
        wait_until(peers, lambda: late._offered is None and any(each["status"]["round"] == 1 for each in held))  # type: ignore[index]
        assert not late.wait(0)
        monkeypatch.undo()
        for message in held:
            late._hear(message)
        assert late.wait(0) and late.round == 1


def test_eight_bits_are_close(tmp_path: pathlib.Path) -> None:
    with swarm_of(*(lambda peer=peer: Peer(peer, f"run@{tmp_path}", mix=1.0) for peer in range(2))) as peers:  # type: ignore[misc]
        meet(peers)
        for _ in range(3):
            make_round(peers)
        start = [each.detach() for each in model_of(0).parameters()]
        made, wanted, begin = map(flat, (peers[0].values(), simulated([WHOLE] * 3, 2, 1.0)[0], start))
        assert torch.linalg.norm(made - wanted) < 0.05 * torch.linalg.norm(wanted - begin)


def test_fragments_are_averaged_in_turn(tmp_path: pathlib.Path) -> None:
    options = {"payload": "float32", "fragment_s": 1e-9}
    with swarm_of(*(lambda peer=peer: Peer(peer, f"run@{tmp_path}", **options) for peer in range(2))) as peers:  # type: ignore[misc]
        meet(peers)
        rounds = [WHOLE, WHOLE, (2, (0, 1)), (1, (1, 2)), (1, (2, 3)), (1, (3, 4)), (2, (0, 1))]
        for steps, blocks in rounds:
            assert {each.outer._status.blocks for each in peers} == {blocks}
            make_round(peers, steps)
        for mine, expected in zip(peers, simulated(rounds, 2, 0.5), strict=True):
            for value, other in zip(mine.values(), expected, strict=True):
                torch.testing.assert_close(value, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mix", [1.0, 0.5])
def test_outer_parameters_keep_what_inner_ones_of_16_bits_cannot_hold(
    mix: float, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is lost when inner parameters are rounded is no change of the peer."""
    options = {"payload": "float32", "mix": mix, "dtype": torch.bfloat16}
    options["optimizer"] = lambda parameters: torch.optim.SGD(parameters, lr=1.0)

    def outer_of(peer: Peer) -> torch.Tensor:
        return flat(list(peer.outer.state_dict()["parameters"].values()))

    with swarm_of(*(lambda peer=peer: Peer(peer, f"run@{tmp_path}", **options) for peer in range(2))) as peers:  # type: ignore[misc]
        meet(peers)
        before: list[torch.Tensor] = []
        for each in peers:

            def merge(message: dict[str, Any], each: Peer = each, original: Any = each.outer._merge) -> None:
                before.append(flat(each.values()).float())
                original(message)

            monkeypatch.setattr(each.outer, "_merge", merge)
        make_round(peers)
        first, inner = outer_of(peers[0]), sum(before[-2:]) / 2
        assert (first != first.bfloat16()).any()
        for each in peers:
            each.optimizer.param_groups[0]["lr"] = 0.0
        make_round(peers)
        torch.testing.assert_close(outer_of(peers[0]), first.lerp(inner, 1 - mix), rtol=0, atol=1e-6)


def test_a_peer_that_comes_later_gets_the_state(place: str) -> None:
    with swarm_of(*(lambda peer=peer: Peer(peer, place) for peer in range(2))) as peers:  # type: ignore[misc]
        meet(peers)
        make_round(peers)
        make_round(peers)
        late = Peer(2, place, seed=7)
        try:
            everyone = [*peers, late]
            meet(everyone)
            assert late.outer.round == 2
            for index, value in enumerate(late.values()):
                assert torch.equal(value.flatten(), peers[0].outer._numbers.outer(index))  # They have replaced its own.
            make_round(everyone)
            assert {each.outer.participants for each in everyone} == {3}
            assert len({each.outer.digest for each in everyone}) == 1
        finally:
            late.close()


def test_steps_before_the_courier_has_started_are_in_the_first_change(tmp_path: pathlib.Path) -> None:
    with swarm_of(lambda: Peer(0, f"run@{tmp_path}")) as peers:
        for _ in range(EVERY):
            peers[0].step()
        before = peers[0].values()
        meet(peers)
        assert all(map(torch.equal, peers[0].values(), before))
        peers[0].step()
        assert peers[0].outer._offered_counts["weight"] == 4 * (EVERY + 1)


def test_who_trains_something_else_is_left_out_and_named(place: str, caplog: pytest.LogCaptureFixture) -> None:
    kinds = ("int8", "int8", "int4")
    makers = [lambda peer=peer, kind=kind: Peer(peer, place, payload=kind) for peer, kind in enumerate(kinds)]  # type: ignore[misc]
    with swarm_of(*makers) as peers:
        wait_until(peers, lambda: f"the record of {peers[2].outer.peer} is left out" in caplog.text)
        assert "payload int4; this peer has 4 parameters with 2401 numbers" in caplog.text
        meet(peers[:2])
        make_round(peers[:2])
        assert {each.outer.participants for each in peers[:2]} == {2}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_rounds_go_on_without_a_peer_whose_machine_is_gone(place: str, number: int) -> None:
    with swarm_of(*(lambda peer=peer: Peer(peer, place) for peer in range(3))) as peers:  # type: ignore[misc]
        meet(peers)
        make_round(peers)
        gone = peers[2].outer.courier_pid
        os.kill(gone, number)
        make_round(peers[:2])
        assert [each.outer.participants for each in peers[:2]] == [2, 2]
        if number == signal.SIGSTOP:
            os.kill(gone, signal.SIGCONT)
        wait_until(peers, lambda: peers[2].outer.round == peers[0].outer.round and all_ready(peers))
        make_round_of_all(peers)


def test_one_of_two_machines_is_started_again(tmp_path: pathlib.Path) -> None:
    """No majority of the last round is there any more, and the new peer has another name."""
    with swarm_of(*(lambda peer=peer: Peer(peer, f"run@{tmp_path}") for peer in range(2))) as peers:  # type: ignore[misc]
        meet(peers)
        make_round(peers)
        os.kill(peers[1].outer.courier_pid, signal.SIGSTOP)
        with swarm_of(lambda: Peer(1, f"run@{tmp_path}", seed=7)) as again:
            there = [peers[0], *again]
            meet(there)
            assert again[0].outer.round == 1

            def have_made_a_round() -> bool:
                for each in there:
                    each.step()
                return all(each.outer.round > 1 for each in there)

            wait_until(there, have_made_a_round)
            make_round_of_all(there)
            os.kill(peers[1].outer.courier_pid, signal.SIGCONT)
            wait_until([*peers, *again], lambda: peers[1].outer.round == peers[0].outer.round)
            make_round_of_all([*peers, *again])


def test_a_courier_that_is_killed_again_and_again_loses_no_round(tmp_path: pathlib.Path) -> None:
    with swarm_of(*(lambda peer=peer: Peer(peer, f"run@{tmp_path}") for peer in range(2))) as peers:  # type: ignore[misc]
        meet(peers)
        for number in range(3):
            before = peers[0].outer.round
            for _ in range(EVERY):
                for each in peers:
                    each.step()
            kill(peers[number % 2].outer.courier_pid)
            wait_until(peers, lambda before=before: all(each.outer.round == before + 1 for each in peers))  # type: ignore[misc]
            assert {each.outer.participants for each in peers} == {2}
            assert len({each.outer.digest for each in peers}) == 1


def test_what_takes_a_courier_s_place_is_heard_at_once(tmp_path: pathlib.Path) -> None:
    with swarm_of(lambda: Peer(0, f"run@{tmp_path}")) as peers:
        meet(peers)
        file = tmp_path / "run" / peers[0].outer.peer / "record"

        def version() -> int:
            return Record.of_bytes(file.read_bytes()[32:]).version

        wait_until(peers, file.exists)
        first = version()
        wait_until(peers, lambda: version() > first + 1)  # It has said that it lives, which no memfd keeps.
        kill(before := peers[0].outer.courier_pid)
        last = version()
        wait_until(peers, lambda: peers[0].outer.courier_pid != before and version() != last)
        assert version() > last


def test_a_fork_of_the_host_leaves_the_courier_alone(tmp_path: pathlib.Path) -> None:
    with swarm_of(lambda: Peer(0, f"run@{tmp_path}")) as peers:
        meet(peers)
        outer, result = peers[0].outer, peers[0].step()
        before = outer.courier_pid
        if (child := os.fork()) == 0:
            try:
                with pytest.raises(
                    accelmgr.UsageError, match=f"in a forked child; it belongs to process {os.getppid()}"
                ):
                    outer.step(result)
                outer.close()
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        assert os.waitpid(before, os.WNOHANG) == (0, 0)  # It runs.
        assert outer.wait(BOUND_S) and outer.courier_pid == before


def test_a_courier_that_hangs_is_replaced(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with swarm_of(lambda: Peer(0, f"run@{tmp_path}")) as peers:
        meet(peers)
        before = peers[0].outer.courier_pid
        os.kill(before, signal.SIGSTOP)
        monkeypatch.setattr(diloco, "HANG_S", 3.0)
        wait_until(peers, lambda: peers[0].outer.courier_pid != before)
        monkeypatch.undo()
        wait_until(peers, lambda: all_ready(peers))


def test_a_courier_that_cannot_take_another_one_s_place_is_tried_again(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    with swarm_of(lambda: Peer(0, f"run@{tmp_path}")) as peers:
        meet(peers)
        kill(peers[0].outer.courier_pid)
        shutil.rmtree(tmp_path / "run")
        (tmp_path / "run").touch()  # As a mount that is gone for a while.
        wait_until(peers, lambda: "cannot start" in caplog.text)
        (tmp_path / "run").unlink()
        wait_until(peers, (tmp_path / "run" / peers[0].outer.peer / "record").exists)


def test_a_peer_finds_the_others_again_when_the_first_address_is_gone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()[:2]
    place = f"run@{address[0]}:{address[1]}"
    with swarm_of(lambda: Peer(0, place)) as first, contextlib.ExitStack() as stack:
        meet(first)  # It serves at that address.
        peers = [*first, *stack.enter_context(swarm_of(lambda: Peer(1, place), lambda: Peer(2, place)))]
        meet(peers)
        make_round(peers)
        peers[0].outer.close()
        with socket.create_server(address):  # Another program has the address now.
            kill(peers[1].outer.courier_pid)
            kill(peers[2].outer.courier_pid)
            make_round(peers[1:])
        assert [each.outer.participants for each in peers[1:]] == [2, 2]


def test_alone_there_is_no_round_and_that_is_said(tmp_path: pathlib.Path) -> None:
    with swarm_of(lambda: Peer(0, f"run@{tmp_path}")) as peers:
        meet(peers)
        for _ in range(EVERY):
            peers[0].step()
        wait_until(peers, lambda: bool(peers[0].outer._offered))
        assert peers[0].outer.round == 0
        assert "alone" in peers[0].outer.waiting_for


def test_who_has_another_secret_is_no_peer(place: str, caplog: pytest.LogCaptureFixture) -> None:
    makers = [lambda: Peer(0, place, secret="one"), lambda: Peer(1, place, secret="other")]
    with swarm_of(*makers) as peers:
        wait_until(peers, lambda: "secret" in caplog.text)
        assert len({each.outer._status.lineage for each in peers}) == 2


def test_a_change_that_is_not_finite_is_left_out(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    with swarm_of(*(lambda peer=peer: Peer(peer, f"run@{tmp_path}") for peer in range(3))) as peers:  # type: ignore[misc]
        meet(peers)
        make_round(peers)
        with torch.no_grad(), peers[2].manager.writing():
            peers[2].model.first.bias[0] = float("nan")
        for _ in range(EVERY):
            for each in peers[:2]:
                each.step()
        peers[2].outer._steps = EVERY
        peers[2].outer._act()
        wait_until(peers, lambda: all(each.outer.round == 2 for each in peers))
        assert peers[0].outer.participants == 2
        assert "not finite" in caplog.text
        assert all(value.isfinite().all() for value in peers[0].values())


def test_a_change_that_is_far_larger_than_the_others_is_scaled_down(tmp_path: pathlib.Path) -> None:
    options = {"mix": 1.0, "bound": 2.0, "payload": "float32"}
    with swarm_of(*(lambda peer=peer: Peer(peer, f"run@{tmp_path}", **options) for peer in range(3))) as peers:  # type: ignore[misc]
        meet(peers)
        before = copy.deepcopy(peers[0].outer._base)
        for _ in range(EVERY - 1):
            for each in peers:
                each.step()
        with torch.no_grad(), peers[2].manager.writing():
            for value in peers[2].manager.parameters():
                value.add_(100.0)
        for each in peers:
            each.step()
        wait_until(peers, lambda: all(each.outer.round == 1 and each.outer._offered is None for each in peers))
        moved = max(float((after - start).abs().max()) for after, start in zip(peers[0].values(), before, strict=True))
        assert moved < 1.0


def test_a_host_that_ends_takes_its_courier_along(tmp_path: pathlib.Path) -> None:
    peer = Peer(0, f"run@{tmp_path}")
    fd = os.pidfd_open(peer.outer.courier_pid)
    try:
        peer.close()
        assert select.select([fd], [], [], BOUND_S)[0]
    finally:
        os.close(fd)
    with pytest.raises(accelmgr.UsageError, match="was closed"):
        peer.outer.wait(1)


def test_who_was_left_out_offers_what_it_has_when_others_do(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its steps took longer, or began later: it was too late in every round."""
    with swarm_of(lambda: Peer(0, f"run@{tmp_path}")) as (peer,):
        wait_until([peer], lambda: all_ready([peer]))
        outer = peer.outer
        monkeypatch.setattr(outer, "_receive", lambda: None)  # It hears what others would have said.
        status = {**dataclasses.asdict(outer._status), "round": 1}
        for _ in range(EVERY + 1):
            peer.step()
        outer._merge(
            {"merge": [[index, False] for index in range(4)], "stands": [status["lineage"], 1], "replaces": False}
        )
        outer._hear({"status": {**status, "is_awaited": True}})
        outer._act()
        assert outer._offered is None  # What it had is dropped.
        peer.step()
        assert outer._offered == [status["lineage"], 1] and outer._offered_counts["weight"] == 4
        outer._merge(
            {"merge": [[index, True] for index in range(4)], "stands": [status["lineage"], 2], "replaces": False}
        )
        outer._hear({"status": {**status, "round": 2}})
        for _ in range(EVERY):
            assert outer._offered is None
            peer.step()
        outer._merge(
            {"merge": [[index, True] for index in range(4)], "stands": [status["lineage"], 3], "replaces": False}
        )
        outer._hear({"status": {**status, "round": 3, "is_awaited": True}})
        peer.step()
        assert outer._offered is None  # It was in time.


def test_what_was_offered_when_the_swarm_was_divided_is_offered_again(tmp_path: pathlib.Path) -> None:
    with swarm_of(lambda: Peer(0, f"run@{tmp_path}")) as (peer,):
        wait_until([peer], lambda: all_ready([peer]))
        outer = peer.outer
        for _ in range(EVERY):
            peer.step()
        weight = outer._offered_counts["weight"]
        assert outer._offered is not None and outer._sum == 0
        peer.step()
        outer._merge({"merge": [], "stands": ["another", 0], "replaces": False})
        assert outer._offered is None
        assert outer._sum == weight + 4 and outer._since == 0 and outer._steps >= outer._due_steps
