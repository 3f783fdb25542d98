"""For tests that launch processes."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from accelmgr import _native
from accelmgr.compat import xla_multiprocessing as xmp

_native.SerialExecutor("any")  # The memory behind them, which a process opens once and keeps.


def _nothing(index: int) -> None:
    pass


@pytest.fixture(autouse=True, scope="module")
def forkserver() -> Iterator[None]:
    """It serves all launches of a process and ends with it; here it is of a module's tests."""
    context = xmp.spawn(_nothing, nprocs=1, join=False, start_method="forkserver")
    assert context is not None and context.join(100)
    yield
    _native.end_forkserver()


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False
