"""Fixtures of all tests in this folder: each test has a time limit, and must leave no process, file or descriptor."""

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
from typing import Any

import loops
import pytest
import torch
from launching import SERVER
from services import Service

import accelmgr
from accelmgr import _native

TEST_S = 480  # Time limit of a test: more than any takes on a loaded machine.
GONE_S = 30  # Time limit for processes to end after a test.
PR_SET_CHILD_SUBREAPER = 36
RECORD = "memfd:accelmgr-record-"  # A manager has two at most; each publication is another one.
TORCH_SHM_MANAGER = "torch_shm_manager"[:15]  # It ends 2 s after the last process that it served.
OF_TORCH = ("/sys/devices/system/cpu/", "/tmp/perf-")  # On aarch64 its first product opens these for good.

for name in [name for name in os.environ if name.startswith("ACCELMGR_")]:
    del os.environ[name]
# Orphans become children of this process, so that it sees which processes a test leaves behind.
if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1) != 0:
    raise OSError(ctypes.get_errno(), "prctl")
# A shell makes a job that it starts with `&` ignore Ctrl-C. Programs that tests start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Makes the standard library open the descriptors that it keeps, before a fixture counts them.
accelmgr.compat.tpu_manager._context.Value(ctypes.c_long, 0)
os.close(multiprocessing.reduction.DupFd(0).detach())


def descendants(root: int = os.getpid()) -> dict[int, str]:
    """The living descendants of a process: names by pid. Reaps children of this one that have ended."""
    with contextlib.suppress(ChildProcessError):
        while os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            reaped = os.waitpid(-1, os.WNOHANG)
            if reaped[0] == 0:
                break
    parents: dict[int, int] = {}
    names: dict[int, str] = {}
    for entry in pathlib.Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError, IndexError):  # The process has ended, or it is no process.
            pid = int(entry.name)
            name, _, rest = (entry / "stat").read_text().partition("(")[2].rpartition(")")
            parents[pid], names[pid] = int(rest.split()[1]), name
    found = {root}
    while grown := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= grown
    return {pid: names[pid] for pid in found - {root}}


def shared_memory() -> set[str]:
    """Files in /dev/shm whose names have `accelmgr` or this pid in them. Other programs have files there too."""
    own = str(os.getpid())
    return {name for name in os.listdir("/dev/shm") if "accelmgr" in name or own in re.findall(r"\d+", name)}


def descriptors() -> dict[int, str]:
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # listdir() lists its own descriptor, which is closed by now.
            # A file that somebody removes meanwhile, such as a log of ctest, stays the same.
            found[int(fd)] = os.readlink(f"/proc/self/fd/{fd}").removesuffix(" (deleted)")
    return {fd: link for fd, link in found.items() if not link.startswith(OF_TORCH)}


def pytest_collection_finish() -> None:
    """Exempts imported modules from garbage collection: left_behind() collects often, and they would take most time."""
    gc.collect()
    gc.freeze()


# Failed tests, and their modules. The traceback of a failed test keeps its frames, and so their descriptors, alive.
failed: set[str] = set()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    if report.failed:
        failed.update((item.nodeid, item.nodeid.partition("::")[0]))
    return report


def left_behind(node: str, before: tuple[dict[int, str], set[str], dict[int, str]], serves: bool) -> list[str]:
    """Describes each process, file of shared memory and descriptor that is there now and was not in `before`.

    `serves` allows a new forkserver, the descriptors that lead to it, and torch's shared memory manager.
    """
    processes, files, fds = before
    gc.collect()
    new = {pid: name for pid, name in descendants().items() if pid not in processes}
    stay = {pid: name for pid, name in new.items() if serves and name in (SERVER, TORCH_SHM_MANAGER)}
    found = [f"process {pid} ({name})" for pid, name in new.items() if pid not in stay]
    found += [f"/dev/shm/{name}" for name in shared_memory() - files]
    if node not in failed and SERVER not in stay.values():
        lives = any("memfd:accelmgr-session" in link for link in fds.values())  # A manager of a module fixture.
        new_fds = {fd: link for fd, link in descriptors().items() if fds.get(fd) != link}
        found += [f"descriptor {fd}: {link}" for fd, link in new_fds.items() if not (lives and RECORD in link)]
    return found


def wait_until_gone(
    node: str, before: tuple[dict[int, str], set[str], dict[int, str]], serves: bool = False
) -> list[str]:
    deadline = time.monotonic() + GONE_S
    while (found := left_behind(node, before, serves)) and time.monotonic() < deadline:
        with contextlib.suppress(ChildProcessError):  # Looks again when a child ends, or after 50 ms.
            signal.sigtimedwait([signal.SIGCHLD], 0.05)
    return found


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test that leaves something behind. Managers of module fixtures are there before, and so allowed."""
    before = descendants(), shared_memory(), descriptors()
    yield
    found = wait_until_gone(request.node.nodeid, before, serves=True)
    if not torch.is_grad_enabled():
        torch.set_grad_enabled(True)
        found.append("gradients disabled")
    assert not found, f"left behind by {request.node.name}: {', '.join(found)}"


@pytest.fixture(autouse=True, scope="module")
def nothing_is_left_of_the_module(request: pytest.FixtureRequest) -> Iterator[None]:
    before = descendants(), shared_memory(), descriptors()
    yield
    found = wait_until_gone(request.node.nodeid, before)
    assert not found, f"left behind by {request.node.name}: {', '.join(found)}"


@pytest.fixture(autouse=True, scope="module")
def forkserver(nothing_is_left_of_the_module: None) -> Iterator[None]:
    """Ends the forkserver after the module's last test. The first launch that needs a forkserver starts it."""
    yield
    _native.end_forkserver()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """The host computes with one, as runners with `runners.threads: 1` do: the same bits."""
    with loops.one_thread():
        yield


@pytest.fixture
def service(tmp_path: pathlib.Path) -> Iterator[Service]:
    with Service(tmp_path) as service:
        yield service


@pytest.fixture
def alarms() -> Iterator[None]:
    """SIGUSR1 and SIGALRM raise harm.Alarm in the main thread."""
    from harm import raise_alarm  # It imports this file.

    before = [(number, signal.signal(number, raise_alarm)) for number in (signal.SIGUSR1, signal.SIGALRM)]
    yield
    for number, handler in before:
        signal.signal(number, handler)


@pytest.fixture
def zeroed(pair: tuple[Any, Any]) -> tuple[Any, Any]:
    """A module's manager and oracle (see oracle.py), without gradients."""
    for each in pair:
        each.zero_grad()
    return pair


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
