"""Of all tests: a bound on each, and that nothing is left after it."""

import contextlib
import ctypes
import faulthandler
import gc
import multiprocessing.reduction
import os
import pathlib
import re
import signal
import sys
import time
from collections.abc import Iterator

import pytest

import accelmgr

TEST_S = 240  # More than any takes on a loaded machine; reached only by one that fails.
GONE_S = 30  # Within which what was ended is gone.
PR_SET_CHILD_SUBREAPER = 36

for name in [name for name in os.environ if name.startswith("ACCELMGR_")]:
    del os.environ[name]
# Orphans become children of this process: it sees what a test leaves behind.
if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1) != 0:
    raise OSError(ctypes.get_errno(), "prctl")
# What the standard library opens once and keeps, before descriptors are counted.
accelmgr.compat.tpu_manager._context.Value(ctypes.c_long, 0)
os.close(multiprocessing.reduction.DupFd(0).detach())


def descendants() -> dict[int, str]:
    """Living processes below this one: names by pid. Reaps those that have ended."""
    with contextlib.suppress(ChildProcessError):
        while os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            reaped = os.waitpid(-1, os.WNOHANG)
            if reaped[0] == 0:
                break
    parents: dict[int, int] = {}
    names: dict[int, str] = {}
    for entry in pathlib.Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError, IndexError):  # It ended meanwhile, or is no process.
            pid = int(entry.name)
            name, _, rest = (entry / "stat").read_text().partition("(")[2].rpartition(")")
            parents[pid], names[pid] = int(rest.split()[1]), name
    found = {os.getpid()}
    while grown := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= grown
    return {pid: names[pid] for pid in found - {os.getpid()}}


def shared_memory() -> set[str]:
    """Files in /dev/shm that could be of this process or of what it starts; other programs have theirs there."""
    own = str(os.getpid())
    return {name for name in os.listdir("/dev/shm") if "accelmgr" in name or own in re.findall(r"\d+", name)}


def descriptors() -> dict[int, str]:
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # That of the listing itself.
            found[int(fd)] = os.readlink(f"/proc/self/fd/{fd}")
    return found


failed: set[str] = set()  # Modules, and tests in them: what failed keeps its frames, and what these hold.


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    if report.failed:
        failed.update((item.nodeid, item.nodeid.partition("::")[0]))
    return report


def left_behind(node: str, before: tuple[dict[int, str], set[str], dict[int, str]]) -> list[str]:
    processes, files, fds = before
    gc.collect()
    found = [f"process {pid} ({name})" for pid, name in descendants().items() if pid not in processes]
    found += [f"/dev/shm/{name}" for name in shared_memory() - files]
    if node not in failed:
        found += [f"descriptor {fd}: {link}" for fd, link in descriptors().items() if fds.get(fd) != link]
    return found


def wait_until_gone(node: str, before: tuple[dict[int, str], set[str], dict[int, str]]) -> list[str]:
    deadline = time.monotonic() + GONE_S
    while (found := left_behind(node, before)) and time.monotonic() < deadline:
        with contextlib.suppress(ChildProcessError):  # Until a child ends, or the next look.
            signal.sigtimedwait([signal.SIGCHLD], 0.05)
    return found


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """What managers of the module's fixtures hold is there before the test."""
    before = descendants(), shared_memory(), descriptors()
    yield
    found = wait_until_gone(request.node.nodeid, before)
    assert not found, f"left behind by {request.node.name}: {', '.join(found)}"


@pytest.fixture(autouse=True, scope="module")
def nothing_is_left_of_the_module(request: pytest.FixtureRequest) -> Iterator[None]:
    before = descendants(), shared_memory(), descriptors()
    yield
    found = wait_until_gone(request.node.nodeid, before)
    assert not found, f"left behind by {request.node.name}: {', '.join(found)}"


@pytest.fixture(autouse=True)
def bounded() -> Iterator[None]:
    def give_up(number: int, frame: object) -> None:
        faulthandler.dump_traceback(file=sys.__stderr__)
        raise TimeoutError(f"the test took more than {TEST_S} s")

    faulthandler.dump_traceback_later(TEST_S + 30, exit=True, file=sys.__stderr__)
    previous = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(TEST_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)
        faulthandler.cancel_dump_traceback_later()
