# Runs in: the courier.
"""Bytes by way of a folder that all peers see: of one machine, a network's file system, a mounted object store."""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import time

from accelmgr.outer._transport import FORGET_S, Absent

POLL_S = 0.02


class Folder:
    """A transport. Each peer has a folder there, and a file in it for each key."""

    def __init__(self, place: str | os.PathLike[str], run: str, peer: str) -> None:
        self._place, self._root, self._peer = pathlib.Path(place), pathlib.Path(place, run), peer
        (self._root / peer).mkdir(parents=True, exist_ok=True)

    def _file(self, peer: str, key: str) -> pathlib.Path:
        return self._root / peer / key.replace("/", "~")

    def publish(self, key: str, value: bytes | None) -> None:
        file = self._file(self._peer, key)
        if value is None:
            file.unlink(missing_ok=True)
            return
        part = file.with_name(f".{file.name}")
        part.parent.mkdir(exist_ok=True)  # Others may have removed it, if this peer has been stopped for long.
        try:
            part.write_bytes(value)
            part.replace(file)
        except OSError:
            part.unlink(missing_ok=True)
            raise

    def fetch(self, key: str, peer: str, deadline: float, known: bytes | None = None) -> bytes:
        file = self._file(peer, key)
        while True:
            with contextlib.suppress(OSError):
                if (value := file.read_bytes()) != known:
                    return value
            if time.monotonic() > deadline:
                raise Absent(f"{key} of {peer} is not in {self._root}", is_gone=not file.parent.exists())
            time.sleep(POLL_S)  # A network's file system tells nobody that a file has come.

    def address(self) -> str:
        return str(self._place)

    def peers(self) -> set[str]:
        written = dict[str, float]()
        for entry in os.scandir(self._root):
            with contextlib.suppress(OSError):  # It is no peer's, or the peer has just left.
                written[entry.name] = os.stat(os.path.join(entry.path, "record")).st_mtime  # Written each second.
        now = max(written.values(), default=0.0)  # By the clock of the folder's machine.
        for name in [name for name, at in written.items() if name != self._peer and now - at > 24 * FORGET_S]:
            shutil.rmtree(self._root / name, ignore_errors=True)  # Its machine was switched off, for instance.
        return {name for name, at in written.items() if name != self._peer and now - at < FORGET_S}

    def places(self) -> dict[str, str]:
        return {}

    def trouble(self) -> str:
        return ""

    def close(self) -> None:
        shutil.rmtree(self._root / self._peer, ignore_errors=True)
