"""What DiLoCo and its courier refuse, and how they say it."""

from __future__ import annotations

import contextlib
import pathlib
import socket
from collections.abc import Callable
from typing import Any

import pytest
import torch
from outer_peers import BOUND_S, Peer, Share, flat, make_round, meet, model_of, swarm_of, wait_until

import accelmgr
import accelmgr.outer


class FourTensors(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        for value in self.param_groups[0]["params"]:
            self.state[value] = {name: torch.zeros(4096) for name in "abcd"}


class OneStep(torch.optim.Adam):
    def step(self, closure: Any = None) -> None:
        if any(state["step"] > 0 for state in self.state.values()):
            raise ValueError("there is no second step")
        super().step()


def test_a_weight_that_is_none_is_refused(tmp_path: pathlib.Path) -> None:
    with swarm_of(lambda: Peer(0, f"run@{tmp_path}", weight=lambda _: float("nan"))) as peers:
        with pytest.raises(accelmgr.UsageError, match="the weight of a step is nan; it must be from 0 to 1e"):
            peers[0].step()


def test_an_address_that_cannot_be_served_at_is_an_error_that_names_it(tmp_path: pathlib.Path) -> None:
    with swarm_of(lambda: Peer(0, "run@127.0.0.1:1", listen="192.0.2.1:4711")) as peers:
        with pytest.raises(accelmgr.SessionError, match=r"cannot start: OSError: .*address"):
            wait_until(peers, lambda: False)


def test_a_peer_that_is_alone_says_who_does_not_answer(caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as closed, contextlib.ExitStack() as stack:
        closed.bind(("127.0.0.1", 0))  # Nobody listens there.
        place = f"127.0.0.1:{closed.getsockname()[1]}"
        peers = stack.enter_context(swarm_of(lambda: Peer(0, f"run@{place}", listen="127.0.0.1:0")))
        trouble = f"{place} does not answer: [Errno 111] Connection refused"
        wait_until(peers, lambda: trouble in peers[0].outer.waiting_for and trouble in caplog.text)


@pytest.mark.parametrize(
    ("optimizer", "why"),
    [
        (torch.optim.LBFGS, "cannot be used: TypeError.*closure"),
        (
            lambda parameters: torch.optim.SGD(parameters[:2]),
            "has 2 of the 4 parameters that it is given, and 0 others",
        ),
        (lambda _: torch.optim.SGD([torch.zeros(3)]), "has 0 of the 4 parameters that it is given, and 1 others"),
        (FourTensors, "cannot be used: ValueError.*three tensors"),
    ],
    ids=["needs_more", "leaves_some_out", "has_others", "keeps_too_much"],
)
def test_an_outer_optimizer_that_cannot_make_rounds_is_refused_at_once(
    optimizer: Callable[[list[torch.Tensor]], torch.optim.Optimizer], why: str, tmp_path: pathlib.Path
) -> None:
    with swarm_of(lambda: Peer(0, f"run@{tmp_path}", optimizer=optimizer)) as peers:
        with pytest.raises(accelmgr.SessionError, match=f"cannot start: ConfigError: the outer optimizer {why}"):
            wait_until(peers, lambda: False)


def test_an_outer_optimizer_that_fails_in_a_later_round_is_an_error_that_says_why(tmp_path: pathlib.Path) -> None:
    """Each courier ended there, and the next one began, without an end."""
    with swarm_of(*(lambda peer=peer: Peer(peer, f"run@{tmp_path}", optimizer=OneStep) for peer in range(2))) as peers:  # type: ignore[misc]
        meet(peers)
        make_round(peers)
        with pytest.raises(accelmgr.SessionError, match="round 2 cannot be made: the outer optimizer.*no second step"):
            make_round(peers)


def test_what_the_trial_of_an_outer_optimizer_changes_is_not_kept(tmp_path: pathlib.Path) -> None:
    def optimizer(parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.5)

    with swarm_of(lambda: Peer(0, f"run@{tmp_path}", optimizer=optimizer)) as peers:
        wait_until(peers, lambda: peers[0].outer.digest != "")
        state = peers[0].outer.state_dict()
        assert flat(list(state["parameters"].values())).equal(flat(peers[0].values()))
        assert not any(state["optimizer"].values())


def test_leased_elements_without_a_swarm_that_leases_them_are_refused(tmp_path: pathlib.Path) -> None:
    leased = accelmgr.outer.Leased(Share(0), 100)
    with accelmgr.Manager(model_of(0), leased, nprocs=1, batch_size_per_device=4) as manager:
        with pytest.raises(accelmgr.ConfigError, match="data is None; it must be the Leased that the manager reads"):
            accelmgr.outer.DiLoCo(manager, f"run@{tmp_path}", 1)


def test_a_parameter_that_was_frozen_is_not_left_out_silently(tmp_path: pathlib.Path) -> None:
    model = model_of(0)
    model.first.requires_grad_(False)
    with accelmgr.Manager(model, Share(0), nprocs=1, batch_size_per_device=4) as manager:
        with accelmgr.outer.DiLoCo(manager, f"run@{tmp_path}", 1) as outer:
            assert outer.wait(BOUND_S)
            model.first.requires_grad_(True)
            with pytest.raises(accelmgr.UsageError, match="'first.weight' is trained now"):
                outer.step(manager.step())


def test_before_the_start_it_is_refused(tmp_path: pathlib.Path) -> None:
    manager = accelmgr.Manager(model_of(0), Share(0), nprocs=1, batch_size_per_device=4, start=False)
    with pytest.raises(accelmgr.UsageError, match="start"):
        accelmgr.outer.DiLoCo(manager, f"run@{tmp_path}", 1)


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"swarm": "run"}, "swarm"),
        ({"swarm": "run@host"}, "swarm"),
        ({"every": 0}, "every"),
        ({"optimizer": torch.optim.SGD([torch.zeros(1)])}, "optimizer"),
        ({"weight": 1.0}, "weight"),
        ({"mix": 0.0}, "mix"),
        ({"payload": "int3"}, "payload"),
        ({"min_peers": 1}, "min_peers"),
        ({"min_peers": None}, "min_peers"),
        ({"bound": -1.0}, "bound"),
        ({"swarm": "run@host:port"}, "swarm"),
        ({"swarm": "run@host:0"}, "swarm"),
        ({"swarm": "run@http://host:29500"}, "swarm"),
        ({"swarm": "run@host:29500/"}, "swarm"),
        ({"swarm": "run@host:1, other:1"}, "swarm"),
        ({"swarm": "user@run@host:1"}, "swarm"),
        ({"swarm": "run@~/shared"}, "swarm"),
        ({"swarm": "../run@/tmp"}, "swarm"),
        ({"swarm": "..@/tmp"}, "swarm"),
        ({"swarm": "@/tmp"}, "swarm"),
        ({"swarm": "run@2001:db8::1:29500"}, "swarm"),
        ({"swarm": "run@host:1", "listen": "4711"}, "listen"),
        ({"swarm": "run@host:1", "advertise": "203.0.113.1"}, "advertise"),
        ({"data": Share(0)}, "data"),
        ({"swarm": "run@/ip4/203.0.113.1/tcp/31337"}, "swarm"),
        ({"swarm": None}, "swarm"),
        ({"fragment_s": 0.0}, "fragment_s"),
    ],
)
def test_what_cannot_be_is_refused_with_its_name(options: dict[str, object], key: str, tmp_path: pathlib.Path) -> None:
    with accelmgr.Manager(model_of(0), Share(0), nprocs=1, batch_size_per_device=4) as manager:
        with pytest.raises(accelmgr.ConfigError) as caught:
            accelmgr.outer.DiLoCo(manager, **{"swarm": f"run@{tmp_path}", "every": 1, **options})  # type: ignore[arg-type]
        assert caught.value.key == key
