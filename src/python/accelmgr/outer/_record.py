# Runs in: the courier.
"""What a peer tells all others, and how it is checked when it comes from them."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import types
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints

from accelmgr.outer._leases import Leases
from accelmgr.outer._transport import MOST_RECORD

MOST_WEIGHT = 1e30
MOST_ELEMENTS = 1 << 60
MOST_TEXT = 10_000
"""Characters. A lineage has some for each time that the swarm was divided."""

Ballot = tuple[int, str]
"""An attempt and who proposes in it."""


class Proposal(NamedTuple):
    """A round: whose changes of which blocks are averaged, with which weights."""

    number: int
    lineage: str
    members: tuple[str, ...]
    weights: tuple[float, ...]
    voters: tuple[str, ...]
    """Who decides the round after it."""
    blocks: tuple[int, int]
    next_blocks: tuple[int, int]
    """What the round after it averages."""
    total: float
    """The weights of this round and all before it."""
    leases: Leases
    """Which elements each peer uses after it."""
    made_in: Ballot
    """The attempt for which it was made: another one's members publish their changes again."""

    @property
    def key(self) -> str:
        """Names what members publish for this proposal."""
        return hashlib.sha256(json.dumps(self).encode()).hexdigest()[:32]

    def weight_of(self, peer: str) -> float:
        """0: no change of this peer is in it."""
        return dict(zip(self.members, self.weights, strict=True)).get(peer, 0.0)


Accepted = tuple[Ballot, Proposal, str]
"""The ballot, the proposal, and the SHA-256 of the mean."""


@dataclasses.dataclass(frozen=True)
class Record:
    """What a peer tells all others."""

    peer: str
    version: int = 0
    model: str = ""
    """What is averaged, and how it travels: rounds are made with peers that have the same."""
    lineage: str = ""
    """Which swarm: peers of one lineage have committed the same rounds."""
    round: int = 0
    """The last round that the peer has committed."""
    voters: tuple[str, ...] = ()
    digest: str = ""
    """Of the outer parameters and the outer optimizer's state after that round."""
    blocks: tuple[int, int] = (0, 0)
    """What the next round averages."""
    offer: float | None = None
    """The weight of the change that the peer offers to the next round."""
    dropped: int = 0
    """How many of the elements that are leased to the peer it has used for changes that no round has."""
    used: int = 0
    """How many elements after them the offered change has."""
    wanted: int = 0
    """How many elements the peer wants to hold after a round."""
    promised: Ballot = (0, "")
    accepted: Accepted | None = None
    prepared: Ballot | None = None
    """The ballot for which the peer asks for promises."""
    proposal: tuple[Ballot, Proposal] | None = None
    lacking: tuple[str, ...] = ()
    """Peers whose change did not come, or nothing at all."""
    lacking_means: tuple[str, ...] = ()
    """Peers whose part of the mean did not come in time."""
    lacking_in: Ballot = (0, "")
    """The ballot of that proposal."""
    committed: Accepted = ((0, ""), Proposal(0, "", (), (), (), (0, 0), (0, 0), 0.0, Leases(), (0, "")), "")
    """What decided the last round that the peer has committed; before the first one, an empty proposal."""
    has_quorum: bool = True
    """Whether the peer hears a majority of the voters."""
    wants: dict[str, str] = dataclasses.field(default_factory=dict)
    """The name under which the peer asks each other peer to publish its state."""

    def as_bytes(self) -> bytes:
        """JSON with zlib: the names of a hundred peers stand in it many times, and each peer gets it each second."""
        return zlib.compress(json.dumps(dataclasses.asdict(self)).encode())

    @classmethod
    def of_bytes(cls, data: bytes) -> Record:
        """Raises ValueError for what no peer has written."""
        packed = zlib.decompressobj()
        try:
            fields = json.loads(packed.decompress(data, MOST_RECORD))
        except (zlib.error, ValueError, RecursionError) as error:
            raise ValueError(f"no record of a peer: {error}") from error
        if not packed.eof:
            raise ValueError(f"no record of a peer: it is cut off, or longer than {MOST_RECORD} bytes")
        return cls.of_fields(fields)

    @classmethod
    def of_fields(cls, of_json: Any) -> Record:
        """From dataclasses.asdict(), with lists for tuples. Raises ValueError for what no peer has written."""
        try:
            fields = {name: _tuples(value) for name, value in of_json.items()}
            for name in ("proposal", "accepted", "committed"):
                if fields[name] is not None:
                    fields[name] = proposal_of(fields[name])
            record = cls(**fields)
        except (TypeError, KeyError, ValueError, AttributeError, RecursionError) as error:
            raise ValueError(f"no record of a peer: {error}") from error
        for name, kind in _hints(cls).items():
            if not _is(getattr(record, name), kind):
                raise ValueError(f"no record of a peer: its {name} is {str(getattr(record, name))[:100]}")
        proposals = [each[1] for each in (record.proposal, record.accepted, record.committed) if each is not None]
        if not all((record.voters, *(each.voters for each in proposals if each.number > 0))):
            raise ValueError("no record of a peer: voters are missing")
        if any(len(each.members) != len(each.weights) for each in proposals):
            raise ValueError("no record of a peer: members or weights are missing")
        if max([record.offer or 0.0, *(weight for each in proposals for weight in each.weights)]) > MOST_WEIGHT:
            raise ValueError(f"no record of a peer: a weight is more than {MOST_WEIGHT:g}")
        return record


def beginning(
    peer: str, leases: Leases, every: tuple[int, int], *, round: int = 0, blocks: tuple[int, int], total: float = 0.0
) -> Record:
    """Of a peer that has made no round yet, and is a swarm of its own. every: all blocks. Its digest is missing.

    round, total: of a swarm that has ended, with which it begins. blocks: what the first round averages.
    """
    begin = Proposal(round, peer, (peer,), (0.0,), (peer,), every, blocks, total, leases, (0, peer))
    return Record(
        peer,
        lineage=peer,
        round=round,
        voters=(peer,),
        blocks=blocks,
        promised=(0, peer),
        committed=((0, peer), begin, ""),
    )


def proposal_of(value: Any) -> Any:
    """A ballot, its proposal, and what follows, of what JSON has made lists. Raises TypeError or ValueError."""
    ballot, fields, *more = _tuples(value)
    proposal = Proposal(*fields)
    return ballot, proposal._replace(leases=Leases(*proposal.leases)), *more


def _tuples(value: Any) -> Any:
    """With tuples where JSON has lists."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


_hints: Callable[[type], dict[str, Any]] = functools.cache(get_type_hints)


def _is(value: Any, kind: Any) -> bool:
    """Whether a value is of this type, and its numbers and texts are such as records have."""
    origin, inner = get_origin(kind), get_args(kind)
    if kind is bool:
        return type(value) is bool
    if kind is int:
        return type(value) is int and 0 <= value <= MOST_ELEMENTS
    if kind is float:
        return type(value) in (int, float) and 0 <= value < math.inf
    if kind is str:
        return isinstance(value, str) and len(value) <= MOST_TEXT
    if origin is dict:
        return isinstance(value, dict) and all(_is(each, inner[0]) and _is(value[each], inner[1]) for each in value)
    if origin is tuple:
        kinds = (inner[0],) * len(value) if inner[-1] is Ellipsis and isinstance(value, tuple) else inner
        return isinstance(value, tuple) and len(value) == len(kinds) and all(map(_is, value, kinds))
    if isinstance(kind, type) and issubclass(kind, tuple):  # A named one.
        return isinstance(value, kind) and all(map(_is, value, _hints(kind).values()))
    if origin in (Union, types.UnionType):
        return any(_is(value, each) for each in inner)
    return value is None
