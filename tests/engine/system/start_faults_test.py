"""Tests of the program on a machine that lacks something: start_faults_test.py PROGRAM [unittest arguments].

The program must work, or say what is missing, and leave nothing behind.
"""
import contextlib
import os
import pathlib
import resource
import subprocess
import sys
import unittest

import cli_test
from cli_test import DONE, FAILED, SLOW, USAGE, ProgramTest, RunningProgram, descendants, status_fields

NOBODY = 65534

TRAIN = ["train", "--config", "small.yaml", "--steps", "3"]
# Kills a runner: its replacement is another start, and standard error tells of it.
REPLACED = ["--set", "faults=rank=1 step=2 phase=forward fault=kill"]
# The parameters have about 70 MB, and the session four times as much.
LARGE = ["--set", "model.mlp.hidden_size=4096"]


class StartFaultsTest(ProgramTest):
    def run_under(self, *arguments, wrapper=(), prepare=None, env=None):
        """Returns exit code, standard output and standard error. `wrapper` is a command that executes the program."""
        done = subprocess.run([*wrapper, cli_test.PROGRAM, *arguments], cwd=self.folder, text=True, capture_output=True,
                              env=cli_test.environment() if env is None else env, preexec_fn=prepare, check=False)
        self.assert_nothing_left()
        return done.returncode, done.stdout, done.stderr

    def assert_nothing_left(self):
        with self.assertRaises(ChildProcessError, msg="a process was left"):
            while True:
                os.waitpid(-1, 0)

    def assert_trains(self, *arguments, **how):
        code, out, err = self.run_under(*TRAIN, *arguments, **how)
        self.assertEqual(code, DONE, out + err)
        self.assertIn("done: 3 steps", out)

    def unprivileged(self):
        """A command that executes another one as a user who is not root."""
        if os.getuid() != 0:
            return []
        command = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
        if subprocess.run([*command, cli_test.PROGRAM, "--version"], capture_output=True, check=False).returncode:
            self.skipTest(f"{cli_test.PROGRAM} may be run by root alone")
        return command


class MemoryTest(StartFaultsTest):
    def own_group(self):
        """A new memory control group below that of this process, and the file of its limit."""
        groups = pathlib.Path("/proc/self/cgroup").read_text().splitlines()
        for line in groups:
            _, controllers, path = line.split(":", 2)
            if "memory" in controllers.split(","):
                parent, limit = pathlib.Path("/sys/fs/cgroup/memory" + path), "memory.limit_in_bytes"
                break
        else:
            path = next((line[3:] for line in groups if line.startswith("0::")), "")
            parent, limit = pathlib.Path("/sys/fs/cgroup" + path), "memory.max"
        group = parent / f"accelmgr-test-{os.getpid()}"
        try:
            group.mkdir()
            self.addCleanup(group.rmdir)
        except OSError as refused:
            self.skipTest(f"no control group of one's own here: {refused}")
        if not (group / limit).exists():
            self.skipTest(f"{parent} gives no control of memory to the groups below it")
        return group, group / limit

    def test_a_session_beyond_the_limit_of_the_control_group_is_refused_with_it(self):
        group, limit = self.own_group()
        limit.write_text("200M")
        code, _, err = self.run_under(*TRAIN, *LARGE,
                                      prepare=lambda: (group / "cgroup.procs").write_text(str(os.getpid())))
        self.assertEqual(code, FAILED, err)
        self.assertRegex(err, rf"needs \d{{9}} bytes.* \d{{7,9}} are available .*{limit}")

    def test_too_small_an_address_space_is_told(self):
        run = RunningProgram(self, *SLOW)
        run.read_until("step 1/")
        small = max(int(status_fields(pid)["VmPeak"].split()[0]) for pid in descendants(os.getpid()))
        run.process.kill()
        run.process.communicate()
        for spare_mib in (30, 120):
            with self.subTest(spare_mib=spare_mib):
                limit = (small + (spare_mib << 10)) << 10
                code, _, err = self.run_under(*TRAIN, *LARGE,
                                              prepare=lambda n=limit: resource.setrlimit(resource.RLIMIT_AS, (n, n)))
                self.assertEqual(code, FAILED, err)
                self.assertRegex(err, "(?i)accelmgr: .*(cannot allocate|can't allocate|not enough) memory")


class EnvironmentTest(StartFaultsTest):
    def test_no_home_and_next_to_no_environment_are_enough(self):
        for env in ({"PATH": os.environ["PATH"]}, {"HOME": "/nowhere/at/all"}, {}):
            with self.subTest(env=env):
                self.assert_trains(env=env)

    def test_a_working_directory_that_may_not_be_written_is_enough_without_a_log(self):
        user = self.unprivileged()
        self.folder.chmod(0o555)
        self.addCleanup(self.folder.chmod, 0o755)
        self.assert_trains(wrapper=user)
        code, _, err = self.run_under(*TRAIN, "--log", "log.jsonl", wrapper=user)
        self.assertEqual(code, USAGE, err)
        self.assert_contains(err, "--log log.jsonl", "Permission denied")


class StandardStreamsTest(StartFaultsTest):
    def test_closed_ones_are_missed_by_nobody(self):
        for closed in ([0], [1], [2], [0, 1, 2]):
            with self.subTest(closed=closed):
                log = f"log{len(closed)}{closed[0]}.jsonl"
                code, _, err = self.run_under(
                    *TRAIN, *REPLACED, "--log", log, "--checkpoint-dir", f"ck-{log}",
                    wrapper=["sh", "-c", 'exec "$@" ' + " ".join(f"{fd}>&-" for fd in closed), "sh"])
                self.assertEqual(code, DONE, err)
                steps, run = self.read_log(log)
                self.assertEqual((run["ended"], [step["counted"] for step in steps]), ("done", [True] * 3))
        code, _, err = self.run_under("info", wrapper=["sh", "-c", 'exec "$@" >&-', "sh"])
        self.assertEqual((code, err), (DONE, ""))

    def test_without_a_reader_of_standard_error_lost_runners_are_replaced(self):
        reader, writer = os.pipe()
        os.close(reader)
        with contextlib.closing(os.fdopen(writer, "w")) as nobody:
            done = subprocess.run([cli_test.PROGRAM, *TRAIN, *REPLACED], cwd=self.folder, text=True, check=False,
                                  env=cli_test.environment(), stdout=subprocess.PIPE, stderr=nobody)
        self.assertEqual(done.returncode, DONE)
        self.assertIn("done: 3 steps", done.stdout)


if __name__ == "__main__":
    cli_test.PROGRAM = os.path.abspath(sys.argv.pop(1))
    cli_test.become_subreaper()
    unittest.main(verbosity=2)
