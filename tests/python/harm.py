"""Kills, stops and interrupts at random instants, and calls that are made again after them."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection

import torch
from conftest import descendants

import accelmgr

MOST_FAILURES = 20
"""So often a call may fail: what took the place of killed processes may be killed, too."""


class Alarm(Exception):
    pass


def raise_alarm(number, frame):
    raise Alarm


def repeat(check: Callable[[int], str]) -> None:
    """Checks seeds from the second argument of the program on, for as many seconds as the first one says."""
    signal.signal(signal.SIGUSR1, raise_alarm)
    torch.set_num_threads(1)
    end, seed = time.monotonic() + float(sys.argv[1]), int(sys.argv[2])
    while True:
        print(f"seed {seed}: the same: {check(seed)}", flush=True)
        if time.monotonic() > end:
            break
        seed += 1


class Harm:
    """What happens to the processes meanwhile: at a random instant of a call, by a thread."""

    ALL = "nothing", "kill", "kill", "stop", "interrupt"

    def __init__(self, seed: int | str, harms: tuple[str, ...] = ALL, spared: Collection[int] = ()) -> None:
        """spared: processes that are not killed."""
        self._chance = random.Random(f"harm {seed}")
        self._harms, self._spared = harms, set(spared)
        self._main = threading.get_ident()
        self._timer: threading.Timer | None = None

    def begin(self, may_interrupt: bool) -> None:
        what = self._chance.choice(self._harms)
        if what == "interrupt" and not may_interrupt:
            what = "kill" if "kill" in self._harms else "nothing"
        if what != "nothing":
            after_s = self._chance.choice([0.002, 0.02, 0.2]) * self._chance.random()
            self._timer = threading.Timer(after_s, getattr(self, f"_{what}"))
            self._timer.start()

    def end(self) -> None:
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.join()

    def _send(self, number: int, spared: Collection[int] = ()) -> int:
        pid = self._chance.choice(sorted(descendants().keys() - set(spared)) or [0])
        with contextlib.suppress(ProcessLookupError):
            if pid != 0:
                os.kill(pid, number)
        return pid

    def _kill(self) -> None:
        self._send(signal.SIGKILL, self._spared)

    def _stop(self) -> None:
        if (pid := self._send(signal.SIGSTOP)) != 0:
            time.sleep(0.02)  # The pause is the harm. No check depends on its length.
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def _interrupt(self) -> None:
        signal.pthread_kill(self._main, signal.SIGUSR1)


def insist(manager: accelmgr.Manager, harm: Harm | None, call: Callable[[], object], may_interrupt: bool = True) -> int:
    """Makes the call while something happens, again if that ends it. Returns how often it was interrupted."""
    interruptions, failures = 0, 0
    while True:
        try:
            if harm is not None:
                harm.begin(may_interrupt)
            try:
                call()
            finally:
                if harm is not None:
                    harm.end()
            return interruptions
        except Alarm:
            interruptions += 1
        except (accelmgr.StepError, accelmgr.RunnerError, accelmgr.SessionError) as error:
            failures += 1
            if failures == MOST_FAILURES:
                raise AssertionError("a call fails again and again") from error
            if "recover()" in str(error) or isinstance(error, accelmgr.ManagerLost):
                insist(manager, harm, manager.recover, may_interrupt=False)
