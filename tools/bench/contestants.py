"""Builds the programs of a benchmark, runs them one at a time, and ends all their processes."""

import contextlib
import ctypes
import dataclasses
import json
import os
import pathlib
import platform
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable

ROOT = pathlib.Path(__file__).resolve().parents[2]
RELEASE = ROOT / "build" / "release"
TESTED = ROOT / "build" / "test"  # The same with tests, and with fault injection.
BENCH = ROOT / "tools" / "bench"
TIMEOUT_S = 900
MEMORY_SAMPLE_EVERY_S = 0.02


class Failure(Exception):
    """A contestant cannot be built or run. The text names it and has the end of its output."""


def parse_lines(output, _=""):
    """Parses the JSON lines of the contract; see tools/bench/run."""
    lines = []
    for line in output.splitlines():
        if not line.strip():
            continue
        try:
            lines.append({"name": "ours", **json.loads(line)})
        except (ValueError, TypeError):
            raise Failure(f"not a JSON object on standard output: {line[:200]}") from None
    return lines


@dataclasses.dataclass(frozen=True)
class Contestant:
    """A program to measure. `command` is called before each turn, because it may depend on the output of an earlier
    contestant. `read` makes lines of the program's standard output and standard error."""

    name: str
    command: Callable[[], list]
    case: str = ""
    read: Callable[[str, str], list] = parse_lines
    timeout_s: float = TIMEOUT_S

    @property
    def label(self):
        return f"{self.name} {self.case}".strip()


def program(name, target, *arguments, case=""):
    """A benchmark program of ours."""
    return Contestant(name, lambda: [RELEASE / "tools" / "bench" / target, *arguments], case)


def peer(name, script, *arguments, case=""):
    """A script under peers/."""
    return Contestant(name, lambda: [torch_python(), BENCH / "peers" / script, *arguments], case)


OURS = ("ours", "ours_fork", "native")  # Contestants whose programs are built by this project.


def of_another_build(contestant, release):
    other = [str(part).replace(str(RELEASE), str(release)) for part in contestant.command()]
    return dataclasses.replace(contestant, command=lambda: other)


def marked(contestant, build):
    """Marks a contestant's lines with the build that they are from."""

    def read(output, errors):
        return [{**line, "build": build} for line in contestant.read(output, errors)]

    return dataclasses.replace(contestant, case=f"{contestant.case} {build}".strip(), read=read)


def torch_python():
    python = os.environ.get("ACCELMGR_PYTHON") or ROOT / ".venv" / "bin" / "python"
    if shutil.which(python) is None:
        raise Failure(f"there is no {python}, which the peers need; run tools/setup, or set ACCELMGR_PYTHON")
    return python


def build(targets, preset="release"):
    folder = ROOT / "build" / preset
    for command in (["cmake", "--preset", preset], ["cmake", "--build", folder, "--target", *targets]):
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            raise Failure(f"{' '.join(map(str, command))} failed:\n{done.stdout[-4000:]}")


def adopt_orphans():
    """Makes orphans children of this process, so that it sees which processes a contestant leaves behind."""
    pr_set_child_subreaper = 36
    ctypes.CDLL(None).prctl(pr_set_child_subreaper, 1)


def run(contestant):
    """Runs a contestant once and returns its lines."""
    return contestant.read(*_run(contestant, contextlib.nullcontext()))


def peak_memory(contestant):
    """Runs a contestant once and returns the peak memory of all its processes (proportional set size: shared pages
    count once). Sampling costs time, so this turn is not timed."""
    sampler = MemorySampler()
    _run(contestant, sampler)
    return sampler.peak_bytes


def _run(contestant, observer):
    with running(contestant) as run:
        try:
            with observer:
                run.process.wait(contestant.timeout_s)
        except subprocess.TimeoutExpired:
            raise Failure(f"{contestant.label} did not end within {contestant.timeout_s:g} s") from None
        run.check_end()
        return run.output.read_text(), run.errors.read_text()


@dataclasses.dataclass(frozen=True)
class Running:
    """A started program and the files with its output. A pipe would stay open as long as a process is left behind."""

    label: str
    process: subprocess.Popen
    output: pathlib.Path
    errors: pathlib.Path

    def check_end(self, *exit_codes):
        """Waits until the program ends. Throws Failure unless it ends with one of the exit codes (0 if none is given)
        and leaves no process behind."""
        returned = self.process.wait()
        remains = _wait_for_descendants(2)
        if returned not in (exit_codes or (0,)):
            how = f"{self.label} failed with exit code {returned}: {' '.join(self.process.args)}"
            raise Failure(f"{how}\n{self.errors.read_text()[-4000:]}")
        if remains:
            raise Failure(f"{self.label} left processes behind: {', '.join(remains.values())}")


@contextlib.contextmanager
def running(contestant):
    """Starts a contestant. Kills all its processes at the end."""
    command = [str(part) for part in contestant.command()]
    with tempfile.TemporaryDirectory(prefix="accelmgr-bench-") as scratch:
        output, errors = pathlib.Path(scratch, "output"), pathlib.Path(scratch, "errors")
        with output.open("w") as stdout, errors.open("w") as stderr:
            process = _start(contestant, command, stdout, stderr, scratch)
        try:
            yield Running(contestant.label, process, output, errors)
        finally:
            _kill_descendants()
            process.wait()


def _start(contestant, command, stdout, stderr, scratch):
    """Starts a program in a session of its own. So Ctrl-C reaches only this process, which then ends the program."""
    environment = {**os.environ, "TMPDIR": scratch}
    try:
        return subprocess.Popen(
            command, cwd=ROOT, stdout=stdout, stderr=stderr, env=environment, start_new_session=True
        )
    except OSError as error:
        raise Failure(f"cannot start {contestant.label}: {error}") from None


def descendants():
    """{pid: "pid name"} of all living descendants of this process."""
    parents, labels = {}, {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                stat = pathlib.Path("/proc", entry, "stat").read_text()
                name, rest = (
                    stat[stat.index("(") + 1 : stat.rindex(")")],
                    stat[stat.rindex(")") + 2 :].split(),
                )
                if rest[0] not in "ZX":
                    parents[int(entry)], labels[int(entry)] = int(rest[1]), f"{entry} {name}"
    found, border = {}, {os.getpid()}
    while border:
        border = {pid for pid, parent in parents.items() if parent in border}
        found.update((pid, labels[pid]) for pid in border)
    return found


def _wait_for_descendants(seconds):
    deadline = time.monotonic() + seconds
    while (remains := descendants()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return remains


def _kill_descendants():
    while remains := descendants():
        for pid in remains:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


class MemorySampler:
    """A context that samples the proportional set size of all descendants and keeps the largest sum."""

    def __init__(self):
        self.peak_bytes = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self):
        self._thread.start()

    def __exit__(self, *_):
        self._done.set()
        self._thread.join()

    def _sample(self):
        while not self._done.wait(MEMORY_SAMPLE_EVERY_S):
            self.peak_bytes = max(self.peak_bytes, sum(map(proportional_set_bytes, descendants())))


def proportional_set_bytes(pid):
    with contextlib.suppress(OSError):
        for line in pathlib.Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


def cpu_model():
    lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def about_machine():
    """Describes the machine and the commit that are measured."""

    def output_of(*command):
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else "unknown"

    return {
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "torch": output_of(str(torch_python()), "-c", "import torch; print(torch.__version__)"),
        "commit": output_of("git", "describe", "--always", "--dirty"),
        "load": os.getloadavg()[0],
    }
