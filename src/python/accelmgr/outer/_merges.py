# Runs in: the courier.
"""What the host has to merge: the outer parameters of rounds and of other peers, until it has said that it has them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch

from accelmgr.outer._channel import Numbers
from accelmgr.outer._record import Proposal, Record

MOST_BLOCKS = 2000
"""So many are named in one message."""


class Merges:
    """Not for several threads."""

    def __init__(self, numbers: Numbers, parameters: list[torch.Tensor], beginning: list[Any]) -> None:
        """parameters: the outer ones. beginning: the lineage and the round in which this peer began."""
        self._numbers, self._parameters, self._beginning = numbers, parameters, beginning
        self._blocks: dict[int, bool] = {}  # Those to merge; whether this peer took part in their round.
        self._replaces = False  # See the channel.
        self._stands: list[Any] | None = None  # The lineage and the round that the host has merged.
        self._is_under_way = True  # Until the host has said where it stands: it cannot merge before.

    def add_round(self, proposal: Proposal, peer: str) -> None:
        self._blocks.update(dict.fromkeys(range(*proposal.blocks), proposal.weight_of(peer) > 0))

    def add_taken(self, blocks: Collection[int], before: Record) -> None:
        """Blocks of another peer's state, which this one lacked where it stood before."""
        if blocks and [before.lineage, before.round] == self._beginning:
            self._replace()
        self._blocks.update(dict.fromkeys(blocks, False))

    def _replace(self) -> None:
        """The host's parameters become the outer ones: what a new peer has trained alone does not count."""
        self._replaces, self._blocks = True, self._all()

    def _all(self) -> dict[int, bool]:
        return dict.fromkeys(range(len(self._parameters)), False)

    def have(self, stands: list[Any] | None, record: Record, is_first: bool) -> None:
        """The host has merged what it was sent. is_first: said to a courier that takes the place of another one, too.

        stands: None: it has merged nothing yet.
        """
        self._stands, self._is_under_way = stands, False
        began = stands or self._beginning
        if not is_first or began == [record.lineage, record.round]:
            return
        if began == self._beginning:
            self._replace()
        elif began == [record.lineage, record.round - 1]:
            self._blocks.clear()
            self.add_round(record.committed[1], record.peer)
        else:
            self._blocks = self._all()

    def send(self, record: Record, tell: Callable[..., bool]) -> None:
        """Sends what there is to merge, if the host has merged what it was sent before."""
        stands = [record.lineage, record.round]
        if self._is_under_way or (not self._blocks and self._stands == stands):
            return
        blocks = sorted(self._blocks.items())
        part, others = blocks[:MOST_BLOCKS], blocks[MOST_BLOCKS:]
        for index, _ in part:
            self._numbers.outer(index).copy_(self._parameters[index].flatten())
        place = self._stands if others else stands
        self._is_under_way = tell(merge=part, stands=place, replaces=self._replaces)
        if self._is_under_way:
            self._blocks, self._replaces = dict(others), self._replaces and bool(others)
