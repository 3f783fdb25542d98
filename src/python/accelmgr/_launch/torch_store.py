"""A TCPStore of torch, with which the engine finds other processes. The extension module calls it."""

from __future__ import annotations

import time
from datetime import timedelta

import torch
import torch.distributed as dist

from accelmgr._process import torch_version
from accelmgr.errors import ConfigError

FIRST_PAUSE_S = 0.001
LONGEST_PAUSE_S = 0.05


class Client:
    """A client of a TCPStore. It also runs the store's server if it gets a listening socket."""

    def __init__(self, host: str, port: int, listening_fd: int | None, timeout_ms: int) -> None:
        if not dist.is_available():
            raise ConfigError(
                "the ranks meet at a TCPStore of torch.distributed, "
                f"which torch {torch.__version__} was built without; let them meet at a file (init_method file:///PATH)"
            )
        self._store = dist.TCPStore(  # type: ignore[attr-defined]
            host,
            port,
            is_master=listening_fd is not None,
            timeout=timedelta(milliseconds=timeout_ms),
            wait_for_workers=False,
            master_listen_fd=listening_fd,
            use_libuv=torch_version.VERSION >= (2, 6),  # Older servers with libuv take no listening socket.
        )

    def set(self, key: str, value: bytes) -> None:
        self._store.set(key, value)  # type: ignore[arg-type]  # set() takes bytes unchanged.

    def get(self, key: str, patience_ms: int) -> bytes | None:
        """The value of `key`. Waits for it for `patience_ms`; None if it is not set by then."""
        # Not wait(): torch writes a warning to standard error for each one that times out.
        end = time.monotonic() + patience_ms / 1000
        pause = FIRST_PAUSE_S
        while not self._store.check([key]):
            left = end - time.monotonic()
            if left <= 0:
                return None
            time.sleep(min(pause, left))
            pause = min(2 * pause, LONGEST_PAUSE_S)
        value: bytes = self._store.get(key)
        return value

    def has(self, key: str) -> bool:
        return self._store.check([key])

    def add(self, key: str, amount: int) -> int:
        return self._store.add(key, amount)

    def keys(self) -> list[str]:
        """All keys. Needs torch 2.10 or newer. Only the program accelmgr empties a store, and it calls libtorch."""
        return self._store.list_keys()

    def erase(self, key: str) -> None:
        self._store.delete_key(key)


def cuda_device_count() -> int:
    return torch.cuda.device_count()


def use_cuda_device(index: int) -> None:
    torch.cuda.set_device(index)
