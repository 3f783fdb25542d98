"""The call that a launched process makes, and how it gets there."""

from __future__ import annotations

import dataclasses
import os
import pickle
import sys
from collections.abc import Callable
from typing import Any

from accelmgr._launch.main_module import dumps, own_main
from accelmgr._memory.memfd import make_memfd
from accelmgr._serialization.model_pickling import culprit
from accelmgr._serialization.pickling import is_picklable
from accelmgr.errors import UsageError

LARGE_BYTES = 16 * 1024 * 1024
"""From here on arguments travel in a memory file: a message has 64 MiB at most."""


@dataclasses.dataclass
class Target:
    """The call that each process makes: `function(*args, **kwargs)`, or `function(rank, *args, **kwargs)`."""

    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    with_rank: bool = False
    setup: Callable[[], Any] | None = None
    around: Callable[[int, Callable[[], Any]], Any] | None = None
    """Called with the rank, and with a function that makes the call."""
    is_forked: bool = False
    result: Any = None
    """What a call in place has returned: the object itself."""

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise UsageError(f"spawn: {self.function!r} is a {type(self.function).__name__}, which cannot be called")

    def call(self, rank: int) -> Any:
        def call() -> Any:
            return self.function(*((rank,) if self.with_rank else ()), *self.args, **self.kwargs)

        return self.around(rank, call) if self.around is not None else call()


class Payload:
    """A pickled target. It must exist as long as processes may read it."""

    def __init__(self, target: Target) -> None:
        main = own_main()
        try:
            data = dumps(target, main)
        except Exception as error:
            parts = {"function": target.function, "setup": target.setup, "kwargs": target.kwargs}
            parts |= {f"args[{index}]": argument for index, argument in enumerate(target.args)}
            what = next((culprit(part, name) for name, part in parts.items() if not is_picklable(part)), "the target")
            raise UsageError(
                f"spawn: {what} cannot be pickled: {type(error).__name__}: {error}; "
                "the start method 'fork' copies it as it is"
            ) from error
        self._fd = -1
        where = ""
        if len(data) > LARGE_BYTES:
            self._fd = make_memfd("accelmgr-target", len(data))
            with os.fdopen(os.dup(self._fd), "wb") as file:
                file.write(data)
            where, data = f"{os.getpid()}:{self._fd}", b""
        # The target is pickled apart: the reader sets sys.path first, as modules of the target may be found there.
        self.data = pickle.dumps(([os.path.abspath(path) for path in sys.path], sys.argv, main, where, data))

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
