"""A swarm all of whose machines have ended goes on with what one of them has saved."""

from __future__ import annotations

import functools
import itertools
import pathlib
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from launching import kill
from outer_peers import (
    WHOLE,
    Peer,
    Share,
    make_round,
    make_round_of_all,
    meet,
    model_of,
    simulated,
    swarm_of,
)

import accelmgr
from accelmgr.errors import ConfigError, UsageError

OPTIONS: dict[str, Any] = {"mix": 1.0, "payload": "float32"}


def peers_of(count: int, swarm: str, **options: Any) -> list[Callable[[], Peer]]:
    return [functools.partial(Peer, index, swarm, **{**OPTIONS, **options}) for index in range(count)]


def saved_after(rounds: int, folder: pathlib.Path) -> tuple[dict[str, Any], str]:
    """What one of two peers returns after these rounds, by way of a file; and the digest."""
    with swarm_of(*peers_of(2, f"first@{folder}")) as peers:
        meet(peers)
        for _ in range(rounds):
            make_round(peers)
        torch.save(peers[1].outer.state_dict(), folder / "state.pt")
        return torch.load(folder / "state.pt"), peers[0].outer.digest


def test_rounds_are_those_of_a_swarm_that_never_ended(tmp_path: pathlib.Path) -> None:
    state, digest = saved_after(2, tmp_path)
    state["parameters"] = dict(reversed(state["parameters"].items()))  # Names count.
    assert (state["round"], state["total_weight"]) == (2, 2 * 2 * 3 * 4)  # Two rounds of two peers, 3 steps, 4 samples.
    with swarm_of(*peers_of(2, f"second@{tmp_path}", seed=5, state=state)) as peers:
        meet(peers)
        assert [(each.outer.round, each.outer.digest) for each in peers] == [(2, digest)] * 2
        assert make_round(peers) == 3
        assert peers[0].outer.total_weight == 72
        for mine, expected in zip(peers, simulated([WHOLE] * 3, 2, 1.0, again_before=2), strict=True):
            for value, other in zip(mine.values(), expected, strict=True):
                torch.testing.assert_close(value, other, rtol=1e-5, atol=1e-6)


def test_who_has_no_state_or_an_older_one_takes_the_newest(tmp_path: pathlib.Path) -> None:
    state, _ = saved_after(1, tmp_path)
    with swarm_of(*peers_of(2, f"second@{tmp_path}", state=state)) as peers:
        meet(peers)
        make_round(peers)
        newer = peers[0].outer.state_dict()
    newest, none, older = peers_of(3, f"third@{tmp_path}")
    makers = (
        functools.partial(none, state=None),
        functools.partial(older, state=state),
        functools.partial(newest, state=newer),
    )
    with swarm_of(*makers) as peers:
        meet(peers)
        assert [each.outer.round for each in peers] == [2, 2, 2]
        for each in peers:
            for name, value in zip(newer["parameters"], each.values(), strict=True):
                assert torch.equal(value, newer["parameters"][name])
        make_round_of_all(peers)


def test_it_may_be_saved_at_any_time(tmp_path: pathlib.Path) -> None:
    with swarm_of(*peers_of(2, f"run@{tmp_path}")) as peers:
        peers[0].outer.state_dict()  # The courier may be about to start.
        meet(peers)
        first = peers[0].outer.state_dict()
        states = []
        for number in range(3):
            kill(peers[0].outer.courier_pid)
            states.append(peers[0].outer.state_dict())
            make_round(peers)
            assert states[-1]["round"] == number
        assert all(torch.equal(first["parameters"][name], value) for name, value in states[0]["parameters"].items())
        peers[0].outer.close()
        with pytest.raises(UsageError):
            peers[0].outer.state_dict()


def test_a_state_that_does_not_fit_is_refused_with_what_it_lacks(tmp_path: pathlib.Path) -> None:
    state, _ = saved_after(1, tmp_path)
    bias = state["parameters"]["first.bias"]
    shorter = {**state["parameters"], "first.bias": bias[:-1]}
    cases: list[tuple[dict[str, Any], str]] = [
        ({"state": {"model": 1}}, "no state_dict() of a DiLoCo"),
        (
            {"state": {**state, "parameters": shorter}},
            "'first.bias' is (299,)",
        ),
        ({"state": {**state, "parameters": {"other": bias}}}, "'first.weight' is missing in state"),
        ({"state": state, "optimizer": torch.optim.Adam}, "what the outer optimizer needs"),
    ]
    with accelmgr.Manager(model_of(0), Share(0), nprocs=1, batch_size_per_device=4) as manager:
        before = [each.detach().clone() for each in manager.parameters()]
        for options, words in cases:
            with pytest.raises(ConfigError, match=re.escape(words)) as raised:
                accelmgr.outer.DiLoCo(manager, f"second@{tmp_path}", 3, **options)
            assert raised.value.key == "state"
        assert all(map(torch.equal, before, manager.parameters()))


class Read(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Tells in a file which elements were read."""

    def __init__(self, log: pathlib.Path) -> None:
        self.log, self.share = log, Share(0)

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        with self.log.open("a") as file:
            file.write(f"{index}\n")
        return self.share[index]


def test_elements_of_the_rounds_before_are_not_read_again(tmp_path: pathlib.Path) -> None:
    hold = 24

    def peer_of(index: int, run: str, state: dict[str, Any] | None) -> Peer:
        data = accelmgr.outer.Leased(Read(tmp_path / f"{run}.{index}"), hold, state)
        return Peer(index, f"{run}@{tmp_path}", **OPTIONS, dataset=data, data=data, state=state)

    def some_rounds(run: str, state: dict[str, Any] | None) -> dict[str, Any]:
        with swarm_of(*(functools.partial(peer_of, index, run, state) for index in range(2))) as peers:
            meet(peers)
            for _ in range(4):
                make_round(peers)
            return peers[0].outer.state_dict()

    before = some_rounds("first", None)
    left = set(itertools.chain.from_iterable(range(*each) for each in before["returned_elements"]))
    assert 0 < before["next_element"] - len(left) <= before["total_weight"]
    data = accelmgr.outer.Leased(Read(tmp_path / "none"), hold)
    with accelmgr.Manager(model_of(0), data, nprocs=1, batch_size_per_device=4) as manager:
        with pytest.raises(ConfigError, match="make it with the same state"):
            accelmgr.outer.DiLoCo(manager, f"other@{tmp_path}", 3, data=data, state=before)
    after = some_rounds("second", before)
    for index in range(2):
        read = {int(line) for line in (tmp_path / f"second.{index}").read_text().split()}
        assert all(number in left or number >= before["next_element"] for number in read)
    assert after["next_element"] > before["next_element"] and after["round"] > before["round"] >= 3
