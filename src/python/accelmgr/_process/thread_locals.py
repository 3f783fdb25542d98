# Runs in: the host and its forks.
"""The attributes of `threading.local` objects that the host's thread has.

Another thread forks, and what it computes in the forks has these attributes, too.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
import weakref
from collections.abc import Iterator
from typing import Any

from accelmgr import _native

_noted: Any = None
_holding: set[int] = set()


def note() -> None:
    """Notes those of the calling thread, for the forks that follow. They stay noted as they change."""
    global _noted
    if threading.get_ident() not in _holding:
        _noted = _native.thread_dict() if sys.version_info < (3, 13) else _sentinel()


@contextlib.contextmanager
def held() -> Iterator[None]:
    """In the block note() of this thread does nothing: it works for another one, which has noted its own."""
    _holding.add(threading.get_ident())
    try:
        yield
    finally:
        _holding.discard(threading.get_ident())


def take_over() -> None:
    """Gives the calling thread of a fork what is noted."""
    if _noted is None:
        return
    if sys.version_info < (3, 13):
        own = _native.thread_dict()
        for key, value in _noted.items():
            if isinstance(key, str) and key.startswith("thread.local."):
                own[key] = value
        return
    for reference in weakref.getweakrefs(_noted):
        owner, key = reference.__callback__.__self__
        if (local := owner()) is not None:
            vars(local).update(_by_thread(local)[key])


# From 3.13 on an object has a dict with the attributes of each thread. The key lives as long as the thread; another
# object of the thread, the sentinel, has a weak reference for each `threading.local`, which deletes the entry there.


def _sentinel() -> Any:
    probe = threading.local()
    probe.exists = True
    (references,) = (each for each in gc.get_referents(probe) if isinstance(each, set))
    return next(iter(references))()


def _by_thread(local: threading.local) -> dict[Any, dict[str, Any]]:
    # Of a subclass the attributes of the present thread are another dict: it has texts as keys.
    return next(each for each in gc.get_referents(local) if isinstance(each, dict) and not _is_own(each))


def _is_own(found: dict[Any, Any]) -> bool:
    return all(isinstance(key, str) for key in found)
