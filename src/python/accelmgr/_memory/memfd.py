# Runs in: all processes.
"""Files in memory, which other processes open through /proc."""

from __future__ import annotations

import io
import mmap
import os
import weakref

MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Of Linux on x86; Python has the name from 3.13 on.


def make_memfd(name: str, size: int) -> int:
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    os.ftruncate(fd, max(size, 1))
    return fd


def memfd_file(name: str) -> io.FileIO:
    """A memfd that is closed with its last reference. No signal handler raises inside next(), so none is left open."""
    return next(map(io.FileIO, map(os.memfd_create, [name], [os.MFD_CLOEXEC]), ["r+"]))


class HostFile:
    """A memfd of this process that runners open by its address."""

    def __init__(self, name: str) -> None:
        file = memfd_file(name)
        self.fd = file.fileno()
        self._closing = weakref.finalize(self, file.close)  # Also if the manager is never stopped.

    @property
    def address(self) -> str:
        return f"{os.getpid()}:{self.fd}"

    def close(self) -> None:
        """Idempotent."""
        self._closing()


def open_memfd(pid: str | int, fd: str | int, name: str, flags: int = os.O_RDONLY) -> int:
    """Opens the memfd `name` of process `pid`. Raises OSError if it is closed there: `fd` may be another file then."""
    link = f"/proc/{pid}/fd/{fd}"
    if os.readlink(link) != f"/memfd:{name} (deleted)":
        raise FileNotFoundError(link)
    return os.open(link, flags)


def why_not_opened(pid: str | int, error: OSError) -> str:
    """Why open_memfd() has failed, in words."""
    if not isinstance(error, PermissionError):
        return f"the host, process {pid}, has ended or closed its manager"
    return (
        f"process {os.getpid()} may not read memory of the host, process {pid}: {error}. The kernel refuses that when "
        "the host has changed its user or group since it was executed (setuid(), setgid()). Use start_method='fork', "
        "or change them before Python is executed"
    )
