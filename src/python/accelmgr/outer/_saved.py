# Runs in: the host.
"""The state of a swarm as a dict of tensors, numbers and names, and peers that begin with it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from safetensors.torch import load, save

from accelmgr.errors import ConfigError
from accelmgr.outer._leases import FIRST, Leases
from accelmgr.outer._record import Record, beginning
from accelmgr.outer._state import State, snapshot

Shapes = Mapping[str, tuple[int, ...]]


def saved(state_fd: int, shapes: Shapes) -> dict[str, Any] | None:
    """As DiLoCo.state_dict() returns it. None: the courier is about to write it, try again."""
    found = snapshot(state_fd, list(shapes.values()))
    if found is None:
        return None
    record, blocks = Record.of_fields(found[0]), dict(zip(shapes, map(load, found[1]), strict=True))
    last = record.committed[1]
    returned = [*last.leases.returned, *((begin, end) for _, begin, end, _ in last.leases.held)]
    return {
        "round": record.round,
        "total_weight": last.total,
        "next_blocks": list(record.blocks),
        "parameters": {name: block.pop("parameter") for name, block in blocks.items()},
        "optimizer": blocks,
        "next_element": last.leases.next,
        "returned_elements": [list(each) for each in returned if each[0] < last.leases.next],
    }


def check(state: Mapping[str, Any], shapes: Shapes) -> None:
    """Raises ConfigError for what is not the state of a swarm with such parameters."""
    names = {"round", "total_weight", "next_blocks", "parameters", "optimizer", "next_element", "returned_elements"}
    if not isinstance(state, Mapping) or state.keys() != names:
        raise ConfigError("state is no state_dict() of a DiLoCo", "state")
    theirs = {name: tuple(value.shape) for name, value in state["parameters"].items()}
    for name in {**shapes, **theirs}:
        if theirs.get(name) != shapes.get(name):
            there, here = theirs.get(name, "missing"), shapes.get(name, "missing")
            raise ConfigError(f"parameter '{name}' is {there} in state, and {here} in the model", "state")


def begin_with(
    state: Mapping[str, Any],
    state_fd: int,
    shapes: Shapes,
    optimizer: Callable[[list[torch.Tensor]], torch.optim.Optimizer],
    peer: str,
    hold: int,
) -> None:
    """Writes what a courier goes on with. state: one that passed check(). Raises ConfigError."""
    first, returned = state["next_element"], tuple((begin, end) for begin, end in state["returned_elements"])
    held = ((peer, first, first + hold, FIRST),) if hold else ()
    record = beginning(
        peer,
        Leases(held, returned, first + hold),
        (0, len(shapes)),
        round=state["round"],
        blocks=tuple(state["next_blocks"]),
        total=state["total_weight"],
    )
    values = State(state_fd, list(shapes.values()), lambda: list(map(torch.zeros, shapes.values())), optimizer)
    try:
        blocks = [save({"parameter": state["parameters"][name], **state["optimizer"][name]}) for name in shapes]
        values.take(
            dict(enumerate(blocks)), lambda digest: dataclasses.asdict(dataclasses.replace(record, digest=digest))
        )
        values.try_step()
    except OSError:  # Full memory.
        raise
    except Exception as error:
        raise ConfigError(f"state has not what the outer optimizer needs: {error!r}", "state") from error
