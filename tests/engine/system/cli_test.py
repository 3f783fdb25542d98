"""Tests of the program on its command line: cli_test.py PROGRAM [unittest arguments]."""
import contextlib
import ctypes
import itertools
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import tempfile
import unittest

PROGRAM = ""

DONE, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130
WATCHDOG_S = 400  # Longer than any test takes on a loaded machine; only a failing test gets here.

# Prints a line of progress for every step.
SMALL = """\
nprocs: 2
batch_size_per_device: 4
runners: {threads: 1}
model:
  kind: mlp
  mlp: {input_size: 16, hidden_size: 32}
train:
  steps: 20
  progress_every_s: 1.0e-6
"""
# Steps of many micro-batches. SLOW ones take tenths of a second; SLOWER ones take longer than any test waits.
SLOW = ["--set", "grad_accumulation_steps=500", "--set", "train.steps=1000000"]
SLOWER = ["--set", "grad_accumulation_steps=200000", "--set", "batch_size_per_device=1"]


def become_subreaper():
    """Makes orphans children of this process, so that it sees the processes that a program leaves behind."""
    pr_set_child_subreaper = 36
    if ctypes.CDLL(None, use_errno=True).prctl(pr_set_child_subreaper, 1) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


def environment(extra=None):
    own = {name: value for name, value in os.environ.items() if not name.startswith("ACCELMGR_")}
    return {**own, **(extra or {})}


def status_fields(pid):
    lines = pathlib.Path(f"/proc/{pid}/status").read_text().splitlines()
    return dict(line.split(":\t", 1) for line in lines if ":\t" in line)


def cpu_ticks(pid):
    """The CPU time of a process, in user and system mode."""
    after_name = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(after_name[11]) + int(after_name[12])


def is_pending(pid, number):
    fields = status_fields(pid)
    return any(int(fields[mask], 16) >> (number - 1) & 1 for mask in ("SigPnd", "ShdPnd"))


def descendants(ancestor):
    """The names of all descendants, by pid."""
    parents, names = {}, {}
    for entry in pathlib.Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError, KeyError):  # The process has ended, or the entry is no process.
            fields = status_fields(int(entry.name))
            parents[int(entry.name)], names[int(entry.name)] = int(fields["PPid"]), fields["Name"]
    found = {ancestor}
    while grown := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= grown
    return {pid: names[pid] for pid in found - {ancestor}}


class ProgramTest(unittest.TestCase):
    """Runs each test in a new folder, with SMALL as small.yaml. No process or shared memory may be left of a test."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.write("small.yaml", SMALL)
        self.shared_memory = self.named_shared_memory()
        signal.signal(signal.SIGALRM, self.watchdog)
        signal.alarm(WATCHDOG_S)

    def tearDown(self):
        signal.alarm(WATCHDOG_S)
        with self.assertRaises(ChildProcessError, msg="a process was left"):
            while True:
                os.waitpid(-1, 0)
        signal.alarm(0)
        self.assertEqual(self.named_shared_memory(), self.shared_memory)

    @staticmethod
    def named_shared_memory():
        return [name for name in os.listdir("/dev/shm") if "accelmgr" in name]

    def watchdog(self, *_):
        raise AssertionError(f"not done after {WATCHDOG_S} s; processes: {descendants(os.getpid())}")

    def write(self, name, text):
        (self.folder / name).write_text(text)
        return name

    def reserved_port(self):
        """A port of this node that no other process gets until the test ends. Connections to it are refused until one
        listens there, for which it must have set SO_REUSEADDR."""
        held = socket.socket()
        self.addCleanup(held.close)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        return held.getsockname()[1]

    def run_program(self, *arguments, exits=DONE, env=None):
        """Runs the program to its end; returns standard output and standard error."""
        done = subprocess.run([PROGRAM, *arguments], cwd=self.folder, env=environment(env), text=True,
                              capture_output=True, check=False)
        self.assertEqual(done.returncode, exits, done.stdout + done.stderr)
        return done.stdout, done.stderr

    def start(self, *arguments):
        """Starts the program, which a test interferes with. It leads a process group, which a terminal's Ctrl-C goes
        to."""
        process = subprocess.Popen([PROGRAM, *arguments], cwd=self.folder, env=environment(), text=True,
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)

        def end():
            if process.poll() is None:
                process.kill()
            process.communicate()
        self.addCleanup(end)
        return process

    def train(self, *arguments, exits=DONE):
        return self.run_program("train", "--config", "small.yaml", *arguments, exits=exits)

    def assert_contains(self, text, *parts):
        for part in parts:
            self.assertIn(part, text)

    def read_log(self, name):
        lines = [json.loads(line) for line in (self.folder / name).read_text().splitlines()]
        return lines[:-1], lines[-1]["run"]


class HelpTest(ProgramTest):
    def test_without_arguments_it_prints_its_help_and_fails(self):
        _, err = self.run_program(exits=USAGE)
        self.assert_contains(err, "Usage: accelmgr", "train", "config", "info", "accelmgr train --config", "130")

    def test_version(self):
        out, _ = self.run_program("--version")
        self.assertRegex(out, r"^\d+\.\d+\.\d+\n$")

    def test_every_subcommand_has_help(self):
        for command in ("", "train", "config", "config show", "config check", "config reference", "info"):
            with self.subTest(command=command):
                out, err = self.run_program(*command.split(), "--help")
                self.assertIn(f"accelmgr {command}".strip(), out)
                self.assertEqual(err, "")

    def test_info_names_versions_devices_and_contents(self):
        out, _ = self.run_program("info")
        for name, value in {"torch": r"2\.11\.0", "boost": r"1\.\d+", "kernels": r"\S",
                            "devices": r"cpu \(\d+ cores, limited by .+\)",
                            "memory": r"[\d.]+ GiB", "models": "convnet, gpt, mlp, torchscript",
                            "data": "synthetic, text", "optimizers": "sgd, adam, adamw"}.items():
            self.assertRegex(out, rf"(?m)^{name} +{value}")


class ConfigTest(ProgramTest):
    def test_the_reference_has_every_key_that_show_has(self):
        shown, _ = self.run_program("config", "show")
        reference, _ = self.run_program("config", "reference")
        keys = {line.split()[0] for line in shown.splitlines()}
        self.assertGreater(len(keys), 40)
        explained = {line.removesuffix(".NAME") for line in reference.splitlines() if re.fullmatch(r"[\w.]+", line)}
        self.assertEqual(keys, explained)

    def test_check_accepts_what_can_be_used(self):
        out, err = self.run_program("config", "check", "--config", "small.yaml")
        self.assertEqual((out, err), ("small.yaml: ok\n", ""))

    def test_more_threads_than_cores_are_warned_of(self):
        threads = os.cpu_count()
        _, err = self.train("--steps", "1", "--set", f"runners.threads={threads}")
        self.assert_contains(err, "warning", f"2 runners (nprocs) with {threads} threads", f"{threads} cores")


class TrainTest(ProgramTest):
    STEP_KEYS = {"step", "attempt", "status", "counted", "loss", "samples", "step_ms", "compute_ms", "reduce_ms",
                 "wait_ms", "data_ms", "update_ms", "parameter_version", "run_id"}

    def test_the_log_of_twenty_steps_adds_up(self):
        out, _ = self.train("--steps", "20", "--log", "log.jsonl")
        steps, run = self.read_log("log.jsonl")
        self.assertEqual([step["step"] for step in steps], list(range(1, 21)))
        for step in steps:
            self.assertEqual(set(step), self.STEP_KEYS)
            self.assertEqual((step["status"], step["counted"], step["samples"]), ("ok", True, 8))
            self.assertAlmostEqual(step["step_ms"], step["compute_ms"] + step["reduce_ms"] + step["wait_ms"], places=5)
            for part in ("compute_ms", "reduce_ms", "wait_ms", "data_ms", "update_ms"):
                self.assertGreaterEqual(step[part], 0)
        for before, after in itertools.pairwise(steps):
            self.assertLess(before["attempt"], after["attempt"])
            self.assertLess(before["parameter_version"], after["parameter_version"])
        self.assertEqual((run["ended"], run["steps"]), ("done", 20))
        self.assertEqual(run["samples"], sum(step["samples"] for step in steps))
        self.assertEqual((run["first_loss"], run["last_loss"]), (steps[0]["loss"], steps[-1]["loss"]))
        self.assertEqual(len(run["peak_memory_bytes"]["runners"]), 2)
        for peak in (run["peak_memory_bytes"]["host"], run["peak_memory_bytes"]["manager"],
                     *run["peak_memory_bytes"]["runners"]):
            self.assertGreater(peak, 1 << 20)
        self.assertEqual(run["versions"]["torch"], "2.11.0")
        self.assertEqual(run["machine"]["cores"], os.cpu_count())
        self.assertEqual(run["threads"]["runner"], 1)
        self.assertIn("hidden_size", run["configuration"])
        self.assert_contains(out, "step 20/20", "done: 20 steps, 160 samples")

    def test_the_end_of_the_data_ends_the_run_well(self):
        out, err = self.train("--set", "data.elements=24", "--set", "data.epochs=1", "--log", "log.jsonl")
        self.assert_contains(out, "end of data: 3 steps, 24 samples")
        self.assertEqual(err, "")
        _, run = self.read_log("log.jsonl")
        self.assertEqual(run["ended"], "end of data")

    def test_steps_and_runners_override_the_file(self):
        out, _ = self.train("--steps", "2", "--runners", "1")
        self.assert_contains(out, "1 runner", "done: 2 steps, 8 samples")


class RunningProgram:
    """A training run that a test interferes with."""

    def __init__(self, test, *arguments):
        self.process = test.start("train", "--config", "small.yaml", *arguments)
        self.pid = self.process.pid

    def read_until(self, pattern):
        for line in self.process.stdout:
            if re.match(pattern, line):
                return line
        raise AssertionError(f"no line '{pattern}'; it ended with {self.process.communicate()[1]}")

    def wait_for_manager(self):
        while "accelmgr:mgr" not in descendants(self.pid).values():
            os.sched_yield()

    def runners(self):
        return [pid for pid, name in descendants(self.pid).items() if name.startswith("accelmgr:run")]

    def wait_until_runners_compute(self):
        """Waits until a runner has used CPU time: a runner that waits for a step uses almost none."""
        runner = self.runners()[0]
        enough = cpu_ticks(runner) + 10
        while cpu_ticks(runner) < enough:
            os.sched_yield()

    def ctrl_c(self):
        """Sends SIGINT, and returns when the program has taken it: two pending signals would count as one."""
        os.killpg(self.pid, signal.SIGINT)
        with contextlib.suppress(OSError, KeyError):  # The program has ended.
            while is_pending(self.pid, signal.SIGINT):
                os.sched_yield()


class InterruptedTest(ProgramTest):
    def test_ctrl_c_finishes_the_step_and_says_what_was_done(self):
        run = RunningProgram(self, *SLOW, "--log", "log.jsonl")
        run.read_until("step 2/")
        run.ctrl_c()
        out, err = run.process.communicate()
        self.assertEqual(run.process.returncode, INTERRUPTED, err)
        self.assertEqual(err, "")
        closing = out.splitlines()[-1]
        steps, summary = self.read_log("log.jsonl")
        self.assertRegex(closing, rf"^interrupted: {len(steps)} steps, {4000 * len(steps)} samples")
        self.assertEqual((summary["ended"], summary["steps"]), ("interrupted", len(steps)))
        self.assertTrue(all(step["counted"] for step in steps))
        self.assertGreaterEqual(len(steps), 2)

    def test_a_second_ctrl_c_ends_all_at_once(self):
        run = RunningProgram(self, *SLOWER)
        run.read_until("mlp: ")
        run.wait_until_runners_compute()
        run.ctrl_c()
        self.assertIsNone(run.process.poll(), "it did not finish the step")
        run.ctrl_c()
        out, err = run.process.communicate()
        self.assertEqual(run.process.returncode, INTERRUPTED, err)
        self.assertEqual(out, "")

    def test_ctrl_c_while_the_runners_start_ends_the_run(self):
        run = RunningProgram(self, *SLOW)
        run.wait_for_manager()
        run.ctrl_c()
        out, err = run.process.communicate()
        self.assertEqual(run.process.returncode, INTERRUPTED, err)
        self.assertRegex(out.splitlines()[-1], "^interrupted: ")

    def test_a_second_ctrl_c_while_the_runners_start_ends_all_at_once(self):
        run = RunningProgram(self, *SLOWER)
        run.wait_for_manager()
        run.ctrl_c()
        run.ctrl_c()
        _, err = run.process.communicate()
        self.assertEqual(run.process.returncode, INTERRUPTED, err)


if __name__ == "__main__":
    PROGRAM = os.path.abspath(sys.argv.pop(1))
    become_subreaper()
    unittest.main(verbosity=2)
