"""Long runs that look for wrong results (torture), leaks (soak), and input that breaks something (fuzz)."""

import contextlib
import dataclasses
import json
import os
import pathlib
import random
import re
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable

import contestants
from contestants import RELEASE, ROOT, TESTED, Contestant, Failure
from tables import Report, Table, at_most

MIB = 1 << 20


@dataclasses.dataclass(frozen=True)
class Endurance:
    about: str  # what it does, and how to read it
    targets: list  # targets to build
    run: Callable  # minutes, seed, say -> lines
    report: Callable  # lines -> tables.Report
    preset: str = "release"


# ---- torture ----

ROUND_PATIENCE_S = 1800  # Time limit of a round, which takes far less.
LOGS = ROOT / "build" / "bench"


def torture(minutes, seed, say):
    """Runs rounds of the torture test. Returns one line for each round."""
    return torture_rounds("torture", minutes, seed, say)


def service_torture(minutes, seed, say):
    return torture_rounds("service_torture", minutes, seed, say)


def torture_rounds(kind, minutes, seed, say):
    LOGS.mkdir(parents=True, exist_ok=True)
    program = TESTED / "tests/engine/system/system_torture_test"
    command = [program, {"torture": "--torture", "service_torture": "--torture-service"}[kind], minutes, seed, LOGS]
    lines = []
    with contestants.running(Contestant(kind, lambda: command)) as run:
        heard = time.monotonic()
        while True:
            ended = run.process.poll() is not None
            for text in run.output.read_text().splitlines()[len(lines) :]:
                lines.append(json.loads(text))
                heard = time.monotonic()
                say(f"  {round_text(kind, lines[-1])}")
            if ended:
                break
            if time.monotonic() - heard > ROUND_PATIENCE_S:
                raise Failure(f"a round of {kind} has not ended within {ROUND_PATIENCE_S} s")
            time.sleep(0.5)
        run.check_end(0, 1)  # It exits with 1 if a round has failed. The line of that round says so.
    return lines


def round_text(kind, line):
    how = f"{line['failure']}; log: {LOGS}/{kind}-{line['seed']}.log" if line["failure"] else "no difference"
    more = f"{line['recoveries']} recoveries" if kind == "torture" else f"{line['leases']} leases"
    return (
        f"seed {line['seed']}: {line['steps']:,} steps, {line['kills']} kills, {more} "
        f"in {line['disturbed_s']:.0f} s (undisturbed {line['undisturbed_s']:.0f} s): {how}"
    )


def torture_report(lines):
    def total(key):
        return sum(line[key] for line in lines)

    totals = Table("Torture: training under kills, compared with the same undisturbed after every step", ["", "number"])
    totals.rows = [
        ["rounds", str(len(lines))],
        ["steps", str(total("steps"))],
        ["kills", str(total("kills"))],
        ["runners and fork servers lost", str(total("losses"))],
        ["recoveries", str(total("recoveries"))],
        ["recoveries whose manager was killed", str(total("failed_recoveries"))],
        ["disturbed, s", f"{total('disturbed_s'):.0f}"],
        ["undisturbed, s", f"{total('undisturbed_s'):.0f}"],
    ]
    return Report([totals, *kills_of(lines)], [no_failure_in(lines)])


def kills_of(lines):
    return [
        Table("By a process that knows nothing", ["victim", "times"], by_kind(lines, "killed")),
        Table("By the fault library", ["phase", "times"], by_kind(lines, "injected")),
    ]


def by_kind(lines, key):
    kinds = sorted({kind for line in lines for kind in line[key]})
    return [[kind, str(sum(line[key].get(kind, 0) for line in lines))] for kind in kinds]


def no_failure_in(lines):
    return at_most(0, "rounds with a mismatch or a failure", sum(1 for line in lines if line["failure"]))


def service_torture_report(lines):
    def total(key):
        return sum(line[key] for line in lines)

    totals = Table("Hosts of a service under kills, compared with the same undisturbed", ["", "number"])
    totals.rows = [
        ["rounds", str(len(lines))],
        ["steps", str(total("steps"))],
        ["steps that killed services have lost", str(total("steps_made") - total("steps"))],
        ["services", str(total("services"))],
        ["checkpoints", str(total("checkpoints"))],
        ["hosts", str(total("hosts"))],
        ["users of these", str(min(line["users"] for line in lines))],
        ["leases", str(total("leases"))],
        ["kills", str(total("kills"))],
        ["runners and fork servers lost", str(total("losses"))],
        ["disturbed, s", f"{total('disturbed_s'):.0f}"],
        ["undisturbed, s", f"{total('undisturbed_s'):.0f}"],
    ]
    ends = Table("Hosts, by themselves", ["how they ended", "times"], by_kind(lines, "ends"))
    found = Table("What hosts found", ["", "times"], by_kind(lines, "found"))
    return Report([totals, *kills_of(lines), ends, found], [no_failure_in(lines)])


# ---- soak ----

SAMPLE_EVERY_S = 1.0
KILL_EVERY_S = (1, 4)
KINDS = ("manager", "fork server", "host", "runners")
INTERRUPTED = 130


def soak(minutes, seed, say):
    """Trains and kills runners. Returns samples: one line for each kind of process and time."""
    chance = random.Random(seed)
    lines, kills = [], 0
    with tempfile.TemporaryDirectory(prefix="accelmgr-soak-") as folder:
        with contestants.running(Contestant("soak", lambda: soak_command(folder))) as run:
            begin = time.monotonic()
            next_kill = next_word = begin
            while (now := time.monotonic()) < begin + 60 * minutes:
                if run.process.poll() is not None:
                    run.check_end()
                    raise Failure("the training under soak has ended by itself")
                sample = take_sample(run.process.pid)
                lines += [{"at_s": now - begin, **line} for line in sample]
                if sample and now > next_kill:
                    kills += kill_a_runner(run.process.pid, chance)
                    next_kill = now + chance.uniform(*KILL_EVERY_S)
                if now > next_word:
                    say(f"  {now - begin:.0f} s: {kills} runners killed, {summary_of(sample)}")
                    next_word = now + 60
                time.sleep(SAMPLE_EVERY_S)
            run.process.send_signal(signal.SIGINT)
            run.check_end(INTERRUPTED)
        steps = sum(1 for line in open(pathlib.Path(folder, "steps.jsonl")) if '"counted":true' in line)
    say(f"  {steps} steps, {kills} runners killed and replaced")
    return [{**line, "kills": kills, "steps": steps} for line in lines]


def soak_command(folder):
    """An endless training with the shipped configuration. The model is small, for many steps, checkpoints and
    evaluations. The number of restarts has no limit."""
    sets = [
        *("runners.on_loss=restart", "runners.restart_backoff=0", "runners.restarts_per_window=0"),
        *("runners.max_restarts=1000000000", "train.evaluate_every=500", "train.progress_every_s=60"),
        *("model.gpt.layers=2", "model.gpt.width=64", "batch_size_per_device=2"),
    ]
    return [
        *(RELEASE / "tools" / "accelmgr", "train", "--config", ROOT / "configs" / "gpt-licenses.yaml"),
        *(word for setting in sets for word in ("--set", setting)),
        *("--steps", 1_000_000_000, "--log", pathlib.Path(folder, "steps.jsonl")),
        *("--checkpoint-dir", pathlib.Path(folder, "checkpoints"), "--checkpoint-every", 200, "--keep", 2),
    ]


def processes_of(host):
    """{kind: [pid]}"""
    names = {"accelmgr:mgr": "manager", "accelmgr:fork": "fork server"}
    found = {kind: [] for kind in KINDS}
    for pid, label in contestants.descendants().items():
        name = label.split(" ", 1)[1]
        kind = "host" if pid == host else "runners" if name.startswith("accelmgr:run") else names.get(name)
        if kind:
            found[kind].append(pid)
    return found


def take_sample(host):
    """Memory and descriptors by kind of process. Empty while a process is missing, such as a killed runner."""
    found = processes_of(host)
    sample = []
    for kind, pids in found.items():
        memory = [own_bytes(pid) for pid in pids]
        descriptors = [open_descriptors(pid) for pid in pids]
        if len(pids) != (2 if kind == "runners" else 1) or 0 in memory or None in descriptors:
            return []
        sample.append({"kind": kind, "bytes": sum(memory), "descriptors": sum(descriptors)})
    return sample


def own_bytes(pid):
    """The proportional set size of a process without pages of files. Those are libraries, and the share of a process
    in them depends on other processes of the machine."""
    with contextlib.suppress(OSError):
        fields = dict(
            line.split(":", 1) for line in pathlib.Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
        )
        return sum(int(fields[name].split()[0]) * 1024 for name in ("Pss_Anon", "Pss_Shmem"))
    return 0


def open_descriptors(pid):
    with contextlib.suppress(OSError):
        return len(os.listdir(f"/proc/{pid}/fd"))
    return None


def kill_a_runner(host, chance):
    runners = processes_of(host)["runners"]
    with contextlib.suppress(OSError):
        os.kill(chance.choice(runners), signal.SIGKILL)
        return 1
    return 0


def summary_of(sample):
    return f"{sum(line['bytes'] for line in sample) / MIB:.0f} MiB in all" if sample else "someone is missing"


def soak_report(lines):
    memory = Table("Soak: memory (proportional set size without files), MiB", ["", "start", "25%", "50%", "75%", "end"])
    descriptors = Table("Open descriptors", memory.columns)
    targets = []
    for kind in KINDS:
        of_kind = [line for line in lines if line["kind"] == kind]
        memory.rows.append([kind, *(number / MIB for number in course(of_kind, "bytes"))])
        descriptors.rows.append([kind, *map(str, course(of_kind, "descriptors"))])
        third, last = last_quarters(of_kind, "bytes")
        targets.append(at_most(2, f"{kind}, growth of memory in the last quarter, %", 100 * (last / third - 1)))
        third, last = last_quarters(of_kind, "descriptors")
        targets.append(at_most(0, f"{kind}, more descriptors in the last quarter", last - third))
    return Report([memory, descriptors], targets)


def course(lines, key):
    """Values at five times from start to end, each the median of neighbouring samples."""
    values = [line[key] for line in lines]
    width = max(1, len(values) // 20)
    middles = [round(share * (len(values) - 1)) for share in (0, 0.25, 0.5, 0.75, 1)]
    return [statistics.median_high(values[max(0, at - width) : at + width + 1]) for at in middles]


def last_quarters(lines, key):
    """Medians over the third and over the last quarter of the time."""
    end = lines[-1]["at_s"]
    return [
        statistics.median(line[key] for line in lines if begin * end <= line["at_s"] <= (begin + 0.25) * end)
        for begin in (0.5, 0.75)
    ]


# ---- fuzz ----

ASAN = ROOT / "build" / "asan"


def fuzz(minutes, seed, say):
    """Runs one fuzz target after the other. Returns a line for each."""
    LOGS.mkdir(parents=True, exist_ok=True)
    lines = []
    for target in sorted((ASAN / "tests" / "fuzz").glob("fuzz_*")):
        name, log = target.name.removeprefix("fuzz_"), LOGS / f"{target.name}.log"
        keep = LOGS / "fuzz" / name
        keep.mkdir(parents=True, exist_ok=True)
        command = [ROOT / "tests" / "fuzz" / "run", target, "--keep", keep]
        command += ["--seconds", str(round(60 * minutes)), "--seed", str(seed)]
        with log.open("w") as output:
            ended = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT).returncode
        printed = log.read_text(errors="replace")
        inputs, edges = (
            max(map(int, re.findall(pattern, printed)), default=0) for pattern in (r"(?m)^#(\d+)\s", r" cov: (\d+) ")
        )
        lines.append({"target": name, "inputs": inputs, "edges": edges, "ended": ended})
        say(f"  {name}: {inputs:,} inputs, {edges:,} edges" + (f"; a finding: {log}" if ended else ""))
    return lines


def fuzz_report(lines):
    table = Table("Fuzzing", ["target", "inputs", "edges that they reach", "finding"])
    table.rows = [
        [line["target"], f"{line['inputs']:,}", f"{line['edges']:,}", "yes" if line["ended"] else "none"]
        for line in lines
    ]
    return Report([table], [at_most(0, "targets with a finding", sum(1 for line in lines if line["ended"]))])


ALL = {
    "torture": Endurance(
        """The torture test with one seed after the other: training under kills at random, by the fault library and
        by a process that knows nothing, manager and fork server among the victims more often than in the test. After
        every step parameters, gradients, buffers and counters must be those of the undisturbed run. The log of a
        round in which they are not stays in build/bench.""",
        ["system_torture_test"], torture, torture_report, preset="test"),
    "service_torture": Endurance(
        """The same with a service: hosts of three users (as root) attach one after the other, and are killed and
        stopped at random, as are runners and fork server. The service is stopped and continued, and in every second
        round killed and started again from its last checkpoint. The next host goes on with what it finds. After every
        step, every update and every attach all bits must be those of the undisturbed run.""",
        ["system_torture_test"], service_torture, service_torture_report, preset="test"),
    "soak": Endurance(
        """The shipped configuration with a smaller model and without an end, with checkpoints; every few seconds a
        runner is killed and replaced. Memory and descriptors of each process must level off: the median of the last
        quarter against that of the third.""",
        ["accelmgr"], soak, soak_report),
    "fuzz": Endurance(
        """Inputs that libFuzzer makes, one target of tests/fuzz after the other, each for as many minutes, in preset
        asan. What reaches more stays in build/bench/fuzz and is where the next run begins. The log of a finding says
        how to run it again.""",
        ["fuzz_targets"], fuzz, fuzz_report, preset="asan"),
}  # fmt: skip
