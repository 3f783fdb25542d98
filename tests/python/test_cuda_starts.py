"""How runners on CUDA devices start: they open their devices at the same time, and make their models one after the
other. The device is the fake of cuda_runners.py."""

from __future__ import annotations

import functools
import os
import pathlib
import time

import pytest
from cuda_runners import FakeCuda, install, on_the_fake, start
from device_runners import Does, Switched, Vectors
from torch import nn

import accelmgr
from accelmgr._runner import cuda as _cuda

RANKS = 3
PATIENCE_S = 60
pytestmark = on_the_fake


class Noting(FakeCuda):
    """Rank 0 has opened its device when all others have, and they open theirs while it does."""

    notes: pathlib.Path
    rank: int

    def __init__(self, rank: int) -> None:
        type(self).rank = rank
        note(self.notes, f"opens {rank}")
        for awaited in [f"has opened {other}" for other in range(1, RANKS)] if rank == 0 else ["opens 0"]:
            wait_for(self.notes, awaited)
        super().__init__(rank)
        note(self.notes, f"has opened {rank}")


def note(notes: pathlib.Path, what: str) -> None:
    with notes.open("a") as file:
        file.write(f"{what}\n")


def wait_for(notes: pathlib.Path, what: str) -> None:
    end = time.monotonic() + PATIENCE_S
    while what not in notes.read_text().splitlines():
        assert time.monotonic() < end, f"'{what}' never came"
        os.sched_yield()


def install_noting(notes: pathlib.Path) -> None:
    install()
    _cuda.Cuda = Noting  # type: ignore[misc]
    Noting.notes = notes


def make(notes: pathlib.Path) -> nn.Module:
    """Host and manager make the model too, and have no device."""
    rank = getattr(Noting, "rank", None)
    if rank is not None:
        note(notes, f"makes {rank}")
    model = Switched()
    if rank is not None:
        note(notes, f"has made {rank}")
    return model


def test_devices_are_opened_at_once_and_models_made_one_after_the_other(tmp_path: pathlib.Path) -> None:
    notes = tmp_path / "notes"
    with start(
        functools.partial(make, notes), Vectors(), nprocs=RANKS, fake=Does(functools.partial(install_noting, notes))
    ) as manager:
        manager.step(accumulate=False).raise_for_status()
    lines = notes.read_text().splitlines()
    opened, made = lines[: 2 * RANKS], lines[2 * RANKS :]
    assert sorted(opened) == sorted(f"{what} {rank}" for what in ("opens", "has opened") for rank in range(RANKS))
    assert made == [f"{what} {rank}" for rank in range(RANKS) for what in ("makes", "has made")]


class Broken(FakeCuda):
    def __init__(self, rank: int) -> None:
        if rank == 1:
            raise accelmgr.ConfigError("runners.device is cuda, but the GPU is on fire", "runners.device")
        super().__init__(rank)


def install_broken() -> None:
    install()
    _cuda.Cuda = Broken  # type: ignore[misc]


def test_a_device_that_cannot_be_opened_fails_the_start_with_rank_and_reason() -> None:
    with pytest.raises(accelmgr.RunnerError, match=r"runner 1 .* \(opening its device\): .*on fire") as caught:
        start(Switched(), Vectors(), fake=Does(install_broken))
    assert caught.value.rank == 1
