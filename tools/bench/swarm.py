"""Peers of accelmgr.outer in network namespaces of their own, behind slow links, while some are killed and others join.

usage: swarm.py --forwarder PROGRAM --folder FOLDER --mbit MBIT --minutes M [--loss PERCENT] [--seed S]

Four peers (swarm_peer.py) make steps alone first, then in a swarm; beside these one goes on alone. Each minute, or in
the middle of a shorter run, one of the swarm is killed, and a new one starts in its place. Prints lines of the contract
of tools/bench/run. The peers' logs and what they say stay in FOLDER; a peer that ends by itself is a failure.

Needs no root: a user namespace holds all of it, and the kernel ends what is in it when this program ends in any way.
"""

import argparse
import bisect
import contextlib
import itertools
import json
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import threading
import time

BENCH = pathlib.Path(__file__).resolve().parent
LAB = ["unshare", "--user", "--map-root-user", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
PEERS = 4
PORT = 29500
ROUND_TRIP_MS = 100
QUEUE_MS = 200
COMPUTE_MS = 115.0
MILLIONS = 2.1
EVERY = 50
SAMPLES = 8  # As in swarm_peer.py.
ALONE_S = 15.0
WARM_STEPS = 10
KILL_EVERY_S = 60.0
START_S = 3.0  # After the first step of a process; then all its parts have been loaded.
BEGIN_WITHIN_S = 300.0
END_WITHIN_S = 60.0
CONGESTION = pathlib.Path("/proc/sys/net/ipv4/tcp_congestion_control")  # As new namespaces have it.


class Failure(Exception):
    pass


def say(text):
    print(text, file=sys.stderr, flush=True)


def quietly(*command):
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode != 0:
        raise Failure(f"no links between namespaces here: {' '.join(command)}: {(done.stderr or done.stdout).strip()}")


class Links:
    """A network namespace for each peer, and the program that carries packets between them."""

    def __init__(self, arguments):
        self.samples = []  # What the forwarder has counted.
        self._homes = [self._home() for _ in range(PEERS)]
        networks = [f"/proc/{home.pid}/ns/net" for home in self._homes]
        quality = [arguments.mbit, ROUND_TRIP_MS / 2, arguments.loss, QUEUE_MS, arguments.seed]
        command = [arguments.forwarder, *map(str, quality), *networks]
        self._forwarder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        if self._forwarder.stdout.readline() != "ready\n":
            raise Failure("no links between namespaces here: bench_forwarder needs /dev/net/tun")
        for index in range(PEERS):
            self._enter(index, "ip", "link", "set", "lo", "up")
            self._enter(index, "ip", "address", "add", f"{self.address(index)}/24", "dev", "link0")
            self._enter(index, "ip", "link", "set", "link0", "up")
        threading.Thread(target=self._read, daemon=True).start()

    @staticmethod
    def _home():
        home = subprocess.Popen(["unshare", "--net", "sh", "-c", "echo; exec sleep infinity"], stdout=subprocess.PIPE)
        if not home.stdout.readline():
            raise Failure("no network namespaces here: unshare --net failed")
        return home

    @staticmethod
    def address(index):
        return f"10.78.0.{index + 1}"

    def command(self, index, *command):
        return ["nsenter", f"--net=/proc/{self._homes[index].pid}/ns/net", *command]

    def _enter(self, index, *command):
        quietly(*self.command(index, *command))

    def _read(self):
        for line in self._forwarder.stdout:
            self.samples.append(json.loads(line))

    def check(self):
        if self._forwarder.poll() is not None:
            raise Failure(f"bench_forwarder ended with {self._forwarder.returncode}")

    def carried(self, index, way, at):
        """Bytes that a link has carried until then."""
        after = bisect.bisect_left(self.samples, at, key=lambda sample: sample["at"])
        return self.samples[min(after, len(self.samples) - 1)][way][index]


class Peer:
    """A process of swarm_peer.py, from its start to its end."""

    def __init__(self, links, arguments, index, number, swarm):
        self.name = f"peer-{number:03}" if swarm else f"alone-{number}"
        self.log, self.errors = (arguments.folder / f"{self.name}.{kind}" for kind in ("jsonl", "errors"))
        settings = ["--compute-ms", str(COMPUTE_MS), "--millions", str(MILLIONS), "--seed", str(number)]
        settings += ["--swarm", swarm, "--every", str(EVERY)] if swarm else []
        command = [sys.executable, BENCH / "swarm_peer.py", "--log", self.log, *settings]
        self.begun, self.ended = time.monotonic(), None
        self._lines, self._is_over = None, False
        with self.errors.open("w") as errors:
            self.process = subprocess.Popen(links.command(index, *map(str, command)), stdout=errors, stderr=errors)

    def kill(self):
        self.ended = time.monotonic()
        self.process.kill()
        self.process.wait()

    def end(self):
        self.ended = time.monotonic()
        self.process.terminate()

    def check_end(self):
        try:
            returned = self.process.wait(END_WITHIN_S)
        except subprocess.TimeoutExpired:
            raise Failure(f"{self.name} did not end within {END_WITHIN_S:g} s of SIGTERM") from None
        if returned:
            raise Failure(f"{self.name} ended with {returned}: {self.complaints()[-4000:]}")

    def check(self):
        if self.process.poll() is not None:
            raise Failure(f"{self.name} ended by itself with {self.process.returncode}: {self.complaints()[-4000:]}")

    def complaints(self):
        return self.errors.read_text(errors="replace")

    def events(self, key):
        """The lines of its log with this key, as far as they are whole."""
        if self._lines is None or not self._is_over:
            self._is_over = self.ended is not None and self.process.poll() is not None
            self._lines = []
            with contextlib.suppress(FileNotFoundError):
                for line in self.log.read_text().splitlines():
                    with contextlib.suppress(ValueError):
                        self._lines.append(json.loads(line))
        return [line for line in self._lines if key in line]

    def first(self, key, **where):
        """When it first happened; None: it has not."""
        wanted = where.items()
        return next((event["at"] for event in self.events(key) if wanted <= event.items()), None)

    @property
    def joined(self):
        """When its change was first in a round."""
        return self.first("merged", took_part=True)


def wait(links, peers, seconds, done=lambda: False):
    """Returns whether `done` within so many seconds. Raises Failure when a peer or the forwarder has ended."""
    deadline = time.monotonic() + seconds
    while not (is_done := done()) and time.monotonic() < deadline:
        links.check()
        for peer in peers:
            peer.check()
        time.sleep(0.2)
    return is_done


def alone(links, arguments):
    """Milliseconds of each step of peers that are in no swarm, all at the same time."""
    peers = [Peer(links, arguments, index, index, "") for index in range(PEERS)]
    if not wait(links, peers, BEGIN_WITHIN_S, lambda: all(peer.first("step") for peer in peers)):
        raise Failure("no peer makes steps")
    wait(links, peers, ALONE_S)
    for peer in peers:
        peer.end()
    for peer in peers:
        peer.check_end()
    return [step["ms"] for peer in peers for step in peer.events("step")[WARM_STEPS:]]


def churn(links, arguments):
    """Peers in a swarm. Returns all of them, one that was alone meanwhile, and from when to when they were watched."""
    swarm = "bench@" + ",".join(f"{links.address(index)}:{PORT}" for index in range(PEERS))
    peers = [Peer(links, arguments, index, index, swarm) for index in range(PEERS)]
    living = [*peers, Peer(links, arguments, 0, PEERS, "")]
    if not wait(links, living, BEGIN_WITHIN_S, lambda: all(peer.joined for peer in living[:PEERS])):
        raise Failure(f"no round of all {PEERS} peers within {BEGIN_WITHIN_S:g} s")
    begin = time.monotonic()
    end = begin + 60 * arguments.minutes
    every = KILL_EVERY_S if arguments.minutes >= 2 else 30 * arguments.minutes
    next_kill = begin + every
    while (now := time.monotonic()) < end:
        wait(links, living, min(next_kill, end) - now)
        if time.monotonic() >= end - every / 2:
            continue
        index = (len(peers) - 1) % PEERS
        living[index].kill()
        peers.append(Peer(links, arguments, index, len(peers), swarm))
        say(f"  {time.monotonic() - begin:.0f} s: {living[index].name} was killed, {peers[-1].name} starts")
        living[index] = peers[-1]
        next_kill += every
    end = time.monotonic()
    for peer in living:
        peer.end()
    for peer in living:
        peer.check_end()
    return peers, living[PEERS], begin, end


class Rounds:
    """All rounds that some peer has heard of."""

    def __init__(self, peers, begin, end):
        self.begin, self.end = begin, end
        self.first_heard, self.participants, self.next_blocks, self.digests = {}, {}, {}, {}
        for event in (event for peer in peers for event in peer.events("round")):
            key = event["lineage"], event["round"]
            self.first_heard[key] = min(event["at"], self.first_heard.get(key, float("inf")))
            self.participants[key], self.next_blocks[key] = event["participants"], event["blocks"]
            self.digests.setdefault(key, set()).add(event["digest"])
        made = [key for key in self.first_heard if key[1] > 0]
        self.lineage = max(made, key=self.first_heard.get)[0]
        self.divisions = len({lineage for lineage, _ in made}) - 1
        self.sizes = peers[0].events("sizes")[0]["sizes"]
        last = max(number for lineage, number in made if lineage == self.lineage)
        times = {number: self.first_heard.get((self.lineage_of(number), number)) for number in range(1, last + 1)}
        self.made_at = {number: at for number, at in times.items() if at is not None}

    def lineage_of(self, number):
        """In which the round was made, whose work goes on in the last lineage: L, L/ROUND.PEER after a division."""
        lineage = self.lineage
        while (parts := lineage.rpartition("/"))[0] and number <= int(parts[2].partition(".")[0]):
            lineage = parts[0]
        return lineage

    def between(self, begin, end):
        """Numbers of the rounds that were made then, in their order."""
        return sorted(number for number, at in self.made_at.items() if begin <= at <= end)

    def share(self, number):
        """How much of all parameters a round has averaged."""
        begin, end = self.next_blocks.get((self.lineage_of(number - 1), number - 1), (0, len(self.sizes)))
        return sum(self.sizes[begin:end]) / sum(self.sizes)

    def at(self, number):
        return self.made_at[number]


def calm_times(peers, begin, end):
    """When all places had a peer that had joined."""
    kills = sorted(peer.ended for peer in peers if peer.ended is not None and peer.ended < end)
    times = []
    for start, stop in zip([begin, *kills], [*kills, end], strict=True):
        joins = [peer.joined for peer in peers if peer.begun < stop and (peer.ended or end) > start]
        if None not in joins and max([start, *joins]) < stop:
            times.append((max([start, *joins]), stop))
    return times


def carried_in(links, peers, rounds):
    """Bytes of a peer for one average of all parameters, the steps in which it is made, and seconds of a round."""
    carried = shares = steps = seconds = count = 0
    for begin, end in calm_times(peers, rounds.begin, rounds.end):
        numbers = rounds.between(begin, end)
        if len(numbers) < 2:
            continue
        begin, end = rounds.at(numbers[0]), rounds.at(numbers[-1])
        ways = [
            sum(links.carried(index, way, end) - links.carried(index, way, begin) for index in range(PEERS))
            for way in ("up", "down")
        ]
        carried += max(ways) / PEERS
        shares += sum(rounds.share(number) for number in numbers[1:])
        steps += sum(begin < step["at"] <= end for peer in peers for step in peer.events("step")) / PEERS
        seconds, count = seconds + end - begin, count + len(numbers) - 1
    return (carried / shares, steps / shares, seconds / count) if shares else (None, None, None)


def computing(peers, rounds):
    """Milliseconds of each step, and seconds in which peers could have made steps."""
    times, seconds = [], 0.0
    for peer in peers:
        made = peer.events("step")
        begin = max(rounds.begin, made[0]["at"] if made else rounds.end)
        seconds += max(0.0, min(rounds.end, peer.ended or rounds.end) - begin)
        times += [step["ms"] for step in made if begin < step["at"] <= rounds.end]
    return times, seconds


def beside_joining(peers, rounds):
    """Milliseconds of steps of peers that had joined: while the state of another one came, and while none did.

    Not while a process starts: it needs the cores of the others here, which a machine of its own has not.
    """
    starting, coming = [], []
    for peer in peers:
        started = (peer.first("step") or rounds.end) + START_S
        starting.append((peer.begun, started))
        coming.append((started, peer.joined or peer.ended or rounds.end))
    joining, calm = [], []
    for peer in peers:
        for step in peer.events("step"):
            begin, end = step["at"] - step["ms"] / 1e3, step["at"]
            if begin < max(peer.joined or rounds.end, rounds.begin) or end > rounds.end:
                continue
            if not any(begin < until and since < end for since, until in starting):
                is_joining = any(begin < until and since < end for since, until in coming)
                (joining if is_joining else calm).append(step["ms"])
    return joining, calm


def courier_share(peers):
    """Percent of a core that a courier needs, from the peer's first round to its last one."""
    needed = seconds = 0.0
    for peer in peers:
        made = [event for event in peer.events("round") if peer.joined and event["at"] >= peer.joined]
        if len(made) > 1:
            needed += made[-1]["courier_s"] - made[0]["courier_s"]
            seconds += made[-1]["at"] - made[0]["at"]
    return 100 * needed / seconds if seconds else None


def missed(peers, rounds):
    """Rounds that went without a peer that had joined and lived, and all such."""
    without = count = 0
    for peer in peers:
        if (joined := peer.joined) is None:
            continue
        last = min(rounds.end, peer.ended or rounds.end)
        numbers = rounds.between(max(joined, rounds.begin), last)
        # What it has merged is heard of somewhat later than that there was a round.
        merged = {event["merged"] for event in peer.events("merged") if event["took_part"]}
        numbers = [number for number in numbers if number <= max(merged)]
        without += sum(number not in merged for number in numbers)
        count += len(numbers)
    return without, count


def percentile(values, share):
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else None


def measured(links, arguments, alone_ms, peers, beside, begin, end):
    """Yields metrics: name, value, unit."""
    rounds = Rounds(peers, begin, end)
    step_s = statistics.mean(alone_ms) / 1e3
    steps, seconds = computing(peers, rounds)
    carried, every, round_s = carried_in(links, peers, rounds)
    share = 100 * len(steps) * step_s / seconds
    yield "share", share, "%"
    beside_ms, beside_s = computing([beside], rounds)
    yield "share_beside", 100 * len(steps) / seconds * beside_s / len(beside_ms), "%"
    if carried is not None:
        carry_s = 8 * carried / (1e6 * arguments.mbit)
        bound = 100 * min(1.0, EVERY * step_s / carry_s)
        yield from (("bound", bound, "%"), ("below", bound - share, "points"))
        yield from (("carried", carried / 2**20, "MiB"), ("carry", carry_s, "s"))
        yield from (("steps_between", every, "steps"), ("round", round_s, "s"))
    yield "step", 1e3 * step_s, "ms"
    yield "courier", courier_share(peers), "%"
    yield "every", EVERY, "steps"
    yield "samples", SAMPLES, "samples"
    yield "p99_alone", percentile(alone_ms, 0.99), "ms"
    yield "p99", percentile(steps, 0.99), "ms"
    for name, times in zip(("p99_joining", "p99_calm"), beside_joining(peers, rounds), strict=True):
        if times:
            yield name, percentile(times, 0.99), "ms"
    numbers = rounds.between(begin, end)
    yield "rounds", len(numbers), "rounds"
    yield "divisions", rounds.divisions, "divisions"
    times = [begin, *map(rounds.at, numbers), end]
    yield "longest", max(after - before for before, after in itertools.pairwise(times)), "s"
    without, of = missed(peers, rounds)
    yield "missed", 100 * without / of if of else 0.0, "%"
    if numbers:
        participants = [rounds.participants[rounds.lineage_of(number), number] for number in numbers]
        yield "participants", statistics.mean(participants), "peers"
    yield "differing", sum(len(found) > 1 for found in rounds.digests.values()), "rounds"
    joining = [peer for peer in peers[PEERS:] if end - peer.begun > KILL_EVERY_S / 2]
    yield "killed", len(peers) - PEERS, "peers"
    yield "not_joined", sum(peer.joined is None for peer in joining), "peers"
    if joins := [peer.joined - peer.begun for peer in joining if peer.joined]:
        yield from (("join", statistics.median(joins), "s"), ("join_longest", max(joins), "s"))
    yield "complaints", sum(len(peer.complaints().splitlines()) for peer in peers), "lines"


def in_lab(arguments):
    """Process 1 of the namespaces."""
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for old in [*arguments.folder.glob("peer-*"), *arguments.folder.glob("alone-*")]:
        old.unlink()
    links = Links(arguments)
    say(f"  {arguments.mbit:g} Mbit/s, {arguments.loss:g}% lost each way, TCP with {CONGESTION.read_text().strip()}")
    alone_ms = alone(links, arguments)
    peers, beside, begin, end = churn(links, arguments)
    (arguments.folder / "links.jsonl").write_text("".join(json.dumps(each) + "\n" for each in links.samples))
    for peer in [*peers, beside]:
        for line in dict.fromkeys(peer.complaints().splitlines()):
            say(f"  {peer.name}: {line}")
    for metric, value, unit in measured(links, arguments, alone_ms, peers, beside, begin, end):
        line = {"name": "ours", "case": f"{arguments.mbit:g} Mbit/s", "metric": metric, "value": value, "unit": unit}
        print(json.dumps(line), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--forwarder", type=pathlib.Path, required=True)
    parser.add_argument("--folder", type=pathlib.Path, required=True)
    parser.add_argument("--mbit", type=float, required=True)
    parser.add_argument("--minutes", type=float, required=True)
    parser.add_argument("--loss", type=float, default=0.05, help="percent, of each direction of a link")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--in-lab", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.in_lab:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        try:
            in_lab(arguments)
        except Failure as failure:
            sys.exit(f"swarm.py: {failure}")
        return
    try:
        quietly(*LAB, "true")
    except (Failure, FileNotFoundError) as failure:
        sys.exit(f"swarm.py: {failure}")
    lab = [*LAB, sys.executable, __file__, "--in-lab", *sys.argv[1:]]
    os.execvp(lab[0], lab)


if __name__ == "__main__":
    main()
