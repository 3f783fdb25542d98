"""Peer of the trigger: a round trip to two worker processes by multiprocessing's Event and Semaphore.

Prints the median round trip host -> two workers -> host. Both primitives park at once, so their case is "parked".
"""

import argparse

from common import FORK, emit, end, time_cycles


class EventPair:
    """One event triggers a worker, another answers."""

    def __init__(self):
        self.triggered, self.finished = FORK.Event(), FORK.Event()

    def trigger(self):
        self.triggered.set()

    def wait_finished(self):
        self.finished.wait()
        self.finished.clear()

    def serve(self):
        while True:
            self.triggered.wait()
            self.triggered.clear()
            self.finished.set()


class SemaphorePair:
    """The same with semaphores, which need not be cleared."""

    def __init__(self):
        self.triggered, self.finished = FORK.Semaphore(0), FORK.Semaphore(0)

    def trigger(self):
        self.triggered.release()

    def wait_finished(self):
        self.finished.acquire()

    def serve(self):
        while True:
            self.triggered.acquire()
            self.finished.release()


def measure(primitive, workers, count):
    pairs = [primitive() for _ in range(workers)]
    processes = [FORK.Process(target=pair.serve, daemon=True) for pair in pairs]
    for process in processes:
        process.start()

    def round_trip():
        for pair in pairs:
            pair.trigger()
        for pair in pairs:
            pair.wait_finished()

    try:
        return time_cycles(round_trip, count // 10, count) * 1e3
    finally:
        end(processes)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    arguments = parser.parse_args()
    count = 500 if arguments.quick else 5000
    for name, primitive in (("mp_event", EventPair), ("mp_semaphore", SemaphorePair)):
        emit(name, "parked", "round_trip", measure(primitive, 2, count), "us")


if __name__ == "__main__":
    main()
