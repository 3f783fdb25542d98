"""Sends this process signals at random times of calls of a manager, and checks that all steps are accounted for.

python signal_storm.py read_by_the_manager 600 17: for ten minutes; 17 draws the same calls, at other instants.
"""

from __future__ import annotations

import gc
import os
import queue
import random
import signal
import sys
import tempfile
import threading
import time

from gate import Count
from harm import Alarm, raise_alarm
from test_signals import CALLS, OPTIONS, Account, BoundToItsThread, Sees, generated

import accelmgr


class Storm:
    def __init__(self, draws, numbers):
        self._draws, self._numbers = draws, numbers
        self._usual_s = {}
        self._wanted: queue.SimpleQueue = queue.SimpleQueue()
        self._calls = self._sent = 0
        threading.Thread(target=self._send, args=(threading.get_ident(),), daemon=True).start()
        self.raised = 0

    def _send(self, main):
        while True:
            after_s, number = self._wanted.get()
            time.sleep(after_s)  # Nothing is waited for: the random instant is what is tested.
            signal.pthread_kill(main, number)
            self._sent += 1

    def _await_signal(self):
        while self._sent < self._calls:
            os.sched_yield()

    def call(self, name, function):
        """Sends a signal at a random time of the call, or soon after it. Returns what the call returns or raises."""
        after_s = self._draws.uniform(0, 1.2 * self._usual_s.get(name, 0.005))
        begin, result, raised = time.perf_counter(), None, None
        number = self._draws.choice(self._numbers)
        self._calls += 1
        try:
            self._wanted.put((after_s, number))
            result = function()
            self._usual_s[name] = time.perf_counter() - begin
        except (KeyboardInterrupt, Alarm) as error:
            raised = error
            self.raised += 1
        finally:
            try:
                self._await_signal()
            except (KeyboardInterrupt, Alarm):
                self._await_signal()
        return raised if raised is not None and result is None else result


INT_AND_ALRM = (signal.SIGINT, signal.SIGALRM)
DATASETS = {
    "read_by_the_manager": (Count, INT_AND_ALRM),
    "read_by_a_thread_of_the_host": (generated, INT_AND_ALRM),
    "read_by_the_host": (lambda: BoundToItsThread(-1, 0), (signal.SIGINT,)),  # An alarm would end its iterator.
}


def storm_over(dataset, seconds, draws, folder):
    make, numbers = DATASETS[dataset]
    model, options = Sees(), {"checkpoint": {"directory": folder}, **OPTIONS}
    with accelmgr.Manager(model, make(), runners__threads=1, **options) as manager:
        account, storm = Account(manager, model), Storm(draws, numbers)
        account.note(manager.step())
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            name = draws.choice(["step"] * 30 + ["zero_grad"] * 5 + [*CALLS])
            if name == "step":
                accumulate = draws.random() < 0.7
                result = storm.call(name, lambda accumulate=accumulate: manager.step(accumulate=accumulate))
                account.note(result, accumulate)
            elif name == "zero_grad":
                storm.call(name, manager.zero_grad)
                manager.zero_grad()  # What was interrupted is done again.
                account.zeroed()
            elif name != "refresh" or draws.random() < 0.1:
                raised = storm.call(name, lambda name=name: CALLS[name](manager, model))
                if name == "refresh" and isinstance(raised, BaseException):
                    manager.refresh()  # There may be no processes now.
                account.note(manager.step())
            account.check(f"after {name}")
        print(f"{manager.statistics().steps} steps, {storm.raised} calls interrupted")


def main(dataset, seconds, seed):
    signal.signal(signal.SIGALRM, raise_alarm)
    with tempfile.TemporaryDirectory() as folder:
        storm_over(dataset, float(seconds), random.Random(int(seed)), folder)
    gc.collect()
    links = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    left = [link for link in links if "accelmgr" in link]
    assert not left, left


if __name__ == "__main__":
    main(*sys.argv[1:])
