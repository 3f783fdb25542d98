"""Starts peers of a hivemind swarm on this machine and prints how they ended. Can kill one peer and start one late.

    python tools/examples/run_swarm.py                          two peers
    python tools/examples/run_swarm.py --peers 3 --kill --late  three: the second is killed, the third comes late
    python tools/examples/run_swarm.py --average parameters
    python tools/examples/run_swarm.py -- --layers 2 --width 32 options after `--` go to hivemind_peer.py

Exit code 1 unless every peer that was not killed ends with the same held-out loss within 0.05. Ends within --seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any, TextIO

PEER = pathlib.Path(__file__).with_name("hivemind_peer.py")
END_S = 20  # Time limit for a finished peer to exit; hivemind takes some seconds.
EQUAL_WITHIN = 0.05  # Nats per byte.


class Failure(Exception):
    """The swarm failed; the text says how."""


class Swarm:
    """The peers by number, and the lines that they have printed."""

    def __init__(self, folder: pathlib.Path, arguments: argparse.Namespace) -> None:
        self._folder, self._arguments = folder, arguments
        self._end = time.monotonic() + arguments.seconds
        self._addresses: list[str] = []
        self._lines: queue.Queue[tuple[int, dict[str, Any] | None]] = queue.Queue()
        self.processes: dict[int, subprocess.Popen[str]] = {}
        self.killed: set[int] = set()
        self.epochs: dict[int, list[dict[str, Any]]] = {}
        self.ends: dict[int, dict[str, Any]] = {}
        self.ready: set[int] = set()

    def start(self, peer: int) -> None:
        a = self._arguments
        command = [sys.executable, str(PEER), "--run-id", f"swarm-{os.getpid()}", "--peer", str(peer)]
        command += ["--track", str(self._folder), "--seconds", str(a.seconds), "--average", a.average]
        command += ["--epochs", "1000000" if a.late else str(a.epochs), *a.peer_arguments]
        command += ["--initial-peers", *self._addresses] if self._addresses else []
        log = (self._folder / f"log.{peer}").open("w")
        with log:  # A process group of its own: close() kills it with all that hivemind starts.
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True)
        self.processes[peer] = process
        assert process.stdout
        threading.Thread(target=self._read, args=(peer, process.stdout), daemon=True).start()
        self._wait(lambda: bool(self._addresses), f"peer {peer} has no address")

    def _read(self, peer: int, output: TextIO) -> None:
        for line in output:
            with contextlib.suppress(ValueError):  # A line that hivemind prints is no JSON.
                self._lines.put((peer, json.loads(line)))
        self._lines.put((peer, None))

    def _wait(self, done: Any, otherwise: str) -> None:
        """Takes lines until done() is true. Raises Failure with `otherwise` if time is up or a peer ends too early."""
        while not done():
            left = self._end - time.monotonic()
            try:
                peer, line = self._lines.get(timeout=max(0.01, left))
            except queue.Empty:
                raise Failure(f"after {self._arguments.seconds:g} s: {otherwise}\n{self.log()}") from None
            if line is not None:
                self._take(peer, line)
            elif peer not in self.ends and peer not in self.killed:
                raise Failure(f"peer {peer} ended too early; {otherwise}\n{self.log(peer)}")

    def _take(self, peer: int, line: dict[str, Any]) -> None:
        if not self._arguments.quiet:
            print(json.dumps(line), flush=True)
        event = line.get("event")
        if event == "address" and not self._addresses:
            self._addresses = line["addresses"]
        elif event == "ready":
            self.ready.add(peer)
        elif event == "epoch":
            self.epochs.setdefault(peer, []).append(line)
        elif event == "end":
            self.ends[peer] = line

    def wait_for_ready(self, peers: list[int]) -> None:
        self._wait(lambda: self.ready.issuperset(peers), f"not all of the peers {peers} are ready")
        (self._folder / "start").touch()

    def epoch(self, peer: int) -> int:
        return int(self.epochs[peer][-1]["epoch"]) if self.epochs.get(peer) else -1

    def wait_for_epoch(self, peer: int, epoch: int) -> None:
        self._wait(lambda: self.epoch(peer) >= epoch, f"peer {peer} is in epoch {self.epoch(peer)}, not in {epoch}")

    def kill(self, peer: int) -> None:
        self.killed.add(peer)
        os.killpg(self.processes[peer].pid, signal.SIGKILL)

    def end_after(self, epoch: int) -> None:
        unfinished = self._folder / "last_epoch.new"
        unfinished.write_text(str(epoch))
        unfinished.rename(self._folder / "last_epoch")

    def wait_for_end(self) -> None:
        living = self.processes.keys() - self.killed
        self._wait(lambda: self.ends.keys() >= living, f"only the peers {sorted(self.ends)} of {sorted(living)} ended")
        (self._folder / "all_finished").touch()
        for peer in living:
            try:
                code = self.processes[peer].wait(END_S)
            except subprocess.TimeoutExpired:
                raise Failure(f"peer {peer} does not end\n{self.log(peer)}") from None
            if code:
                raise Failure(f"peer {peer} ended with exit code {code}\n{self.log(peer)}")

    def log(self, peer: int | None = None) -> str:
        which = list(self.processes) if peer is None else [peer]
        return "\n".join(f"peer {p}: {(self._folder / f'log.{p}').read_text()[-3000:]}" for p in which)

    def close(self) -> None:
        """Kills the process groups of all peers."""
        for process in self.processes.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def run(arguments: argparse.Namespace, swarm: Swarm) -> list[str]:
    """Runs the swarm to its end. Returns the lines of the report."""
    late = arguments.peers - 1 if arguments.late else None
    first = [peer for peer in range(arguments.peers) if peer != late]
    victim = first[-1] if arguments.kill else None
    for peer in first:
        swarm.start(peer)
    swarm.wait_for_ready(first)
    if late is not None:
        swarm.wait_for_epoch(0, 1)
        swarm.start(late)
    if victim is not None:
        swarm.wait_for_epoch(0, 2)
        swarm.kill(victim)
    if late is not None:  # All end when the late peer has made some epochs with the others.
        swarm.wait_for_epoch(late, 1)
        swarm.end_after(max(swarm.epoch(late) + 3, arguments.epochs))
    swarm.wait_for_end()
    losses = {peer: end["held_out_loss"] for peer, end in swarm.ends.items()}
    rounds = [line for lines in swarm.epochs.values() for line in lines]
    report = [
        *(
            f"peer {peer}: epoch {end['epoch']}, held-out loss {end['held_out_loss']:.4f}, "
            f"parameters {end['parameters']}"
            for peer, end in sorted(swarm.ends.items())
        ),
        *(f"peer {peer}: killed in epoch {swarm.epoch(peer)}" for peer in sorted(swarm.killed)),
        (
            f"slowest manager.step() {max(line['slowest_step_s'] for line in rounds):.2f} s, slowest optimizer.step() "
            f"{max(line['slowest_update_s'] for line in rounds):.2f} s"
        ),
    ]
    if max(losses.values()) - min(losses.values()) > EQUAL_WITHIN:
        raise Failure("\n".join([*report, f"the losses differ by more than {EQUAL_WITHIN}"]))
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=int, default=2)
    parser.add_argument("--kill", action="store_true", help="the last of the first ones, after epoch 2")
    parser.add_argument("--late", action="store_true", help="the last peer starts after epoch 1")
    parser.add_argument("--average", choices=["gradients", "parameters"], default="gradients")
    parser.add_argument("--epochs", type=int, default=20, help="at least; more until a late peer has joined")
    parser.add_argument("--seconds", type=float, default=600, help="for everything; peers are ended then")
    parser.add_argument("--quiet", action="store_true", help="only the result")
    parser.add_argument("peer_arguments", nargs="*", help="after `--`: for hivemind_peer.py")
    arguments = parser.parse_args()
    if arguments.peers - arguments.kill - arguments.late < 1:
        parser.error("somebody must be there from the beginning to the end: more --peers")
    with tempfile.TemporaryDirectory(prefix="accelmgr-swarm-") as folder:
        swarm = Swarm(pathlib.Path(folder), arguments)
        try:
            print("\n".join(run(arguments, swarm)))
        except Failure as failure:
            sys.exit(f"run_swarm.py: {failure}")
        finally:
            swarm.close()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    main()
