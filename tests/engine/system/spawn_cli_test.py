"""Tests of `accelmgr spawn` on its command line: spawn_cli_test.py PROGRAM [unittest arguments].

Run it with the Python of the build, which has torch.
"""
import contextlib
import json
import os
import pathlib
import random
import re
import signal
import socket
import subprocess
import sys
import unittest

import cli_test
from cli_test import DONE, FAILED, INTERRUPTED, USAGE, ProgramTest, descendants, status_fields

TESTS = pathlib.Path(__file__).resolve().parents[2]
TWO_NODES = TESTS / "launcher/contract/two_nodes"
TORCH_PROGRAM = TESTS / "engine/system/spawn_torch_program.py"
NO_NAMESPACES = 77

# Each process prints the variables that it was given, as a line of JSON.
TELL = """\
import json, os
names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK",
         "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT",
         "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID"]
print(json.dumps({name: os.environ.get(name) for name in names}))
"""
# Rank 1 writes its error file as torch's @record does, and fails; the other ranks wait.
RECORD = """\
import json, os, signal, sys
if os.environ["RANK"] == "1":
    print("about to fail", file=sys.stderr)
    with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:
        message = {"message": "ValueError: no good", "extraInfo": {"py_callstack": "Traceback: here"}}
        json.dump({"message": message}, file)
    sys.exit(3)
signal.pause()
"""


def shell(script):
    """The arguments that make a shell script the program to launch."""
    return ["--", "sh", "-c", script]


class SpawnTest(ProgramTest):
    def spawn(self, *arguments, exits=DONE, env=None):
        return self.run_program("spawn", *arguments, exits=exits, env=env)

    def start(self, *arguments):
        return super().start("spawn", *arguments)

    def read_lines(self, process, count):
        return sorted(process.stdout.readline() for _ in range(count))

    def wait_for_all(self):
        """Waits for all children of this process, among them the orphans of a killed launch."""
        with contextlib.suppress(ChildProcessError):
            while True:
                os.waitpid(-1, 0)

    def report(self, folder="."):
        return json.loads((self.folder / folder / "accelmgr-error.json").read_text())


class EnvironmentTest(SpawnTest):
    def test_every_rank_is_told_who_it_is(self):
        self.write("tell.py", TELL)
        out, err = self.spawn("--nprocs", "3", "--max-restarts", "2", "--", "tell.py")
        for line in err.splitlines():  # The warning of a machine with fewer cores than ranks.
            self.assertIn("they will wait for each other", line)
        told = {}
        for line in out.splitlines():
            rank, text = re.fullmatch(r"\[rank (\d)\] (.*)", line).groups()
            told[int(rank)] = json.loads(text)
        self.assertEqual(set(told), {0, 1, 2})
        port, run = told[0]["MASTER_PORT"], told[0]["TORCHELASTIC_RUN_ID"]
        self.assertGreater(int(port), 0)
        self.assertTrue(run)
        for rank, values in told.items():
            self.assertEqual(values, {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3",
                "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "ROLE_RANK": str(rank), "ROLE_WORLD_SIZE": "3",
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": "True",
                "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "2", "TORCHELASTIC_RUN_ID": run})

    def test_all_ranks_have_one_memory_of_serial_executors(self):
        found, _ = self.spawn("--nprocs", "2", "--no-prefix",
                              *shell('stat -L -c %i "$ACCELMGR_SERIAL_MEMORY" || echo none of $RANK'))
        first, second = found.splitlines()
        self.assertTrue(first.isdigit(), found)
        self.assertEqual(first, second)

    def test_options_come_from_the_file_and_the_environment_too(self):
        self.write("launch.yaml", "launch: {nprocs: 3, rendezvous: '127.0.0.1:0'}\n")
        out, _ = self.spawn("-c", "launch.yaml", "--print-config", "--no-prefix", *shell("echo of $WORLD_SIZE"),
                            env={"ACCELMGR_LAUNCH__NPROCS": "2"})
        self.assertRegex(out, r"(?m)^launch\.nprocs +2 +environment ACCELMGR_LAUNCH__NPROCS$")
        self.assertRegex(out, r"(?m)^launch\.rendezvous +.*127\.0\.0\.1:0.* +file launch\.yaml:1$")
        self.assertEqual(out.count("of 2\n"), 2)

    def test_a_range_of_hosts_in_a_job_takes_the_number_of_this_one_from_the_job(self):
        out, _ = self.spawn("--nnodes", "2:3", "--rendezvous", "n1:29400", "--nprocs", "1", "--print-config", env={
            "SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_NUM_NODES": "3", "SLURM_PROCID": "2", "SLURM_NODEID": "2",
            "SLURM_STEP_NODELIST": "n[1-3]", "SLURM_JOB_ID": "5"})
        for key, value in (("nnodes", "3"), ("min_nodes", "2"), ("node_rank", "2"), ("rendezvous", '"n1:29400"')):
            self.assertRegex(out, rf"(?m)^launch\.{key} +{value} ")

    def test_a_job_of_mpi_without_a_meeting_place_names_its_variable(self):
        _, err = self.spawn("--nprocs", "1", *shell("true"), exits=USAGE, env={
            "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"})
        self.assert_contains(err, "OMPI_COMM_WORLD_SIZE is 2", "--rendezvous HOST:PORT", "rank 0")

    def test_a_script_of_torch_distributed_runs_unchanged(self):
        out, err = self.spawn("--nprocs", "3", "--", TORCH_PROGRAM)
        sums = [f"[rank {rank}] rank {rank} of 3: sum 6.0" for rank in range(3)]
        self.assertEqual(sorted(out.splitlines()), sums, err)


class OutputTest(SpawnTest):
    def test_lines_are_whole_in_order_and_prefixed_and_files_have_the_bytes(self):
        script = "for i in 1 2 3; do echo out $i; done; printf 'no end'; echo err >&2"
        out, err = self.spawn("--nprocs", "2", "--log-dir", "logs", *shell(script))
        for rank in range(2):
            lines = [line for line in out.splitlines() if line.startswith(f"[rank {rank}] ")]
            self.assertEqual(lines, [f"[rank {rank}] {text}" for text in ("out 1", "out 2", "out 3", "no end")])
            self.assertIn(f"[rank {rank}] err\n", err)
            folder = self.folder / "logs" / "attempt_0" / str(rank)
            self.assertEqual((folder / "stdout.log").read_bytes(), b"out 1\nout 2\nout 3\nno end")
            self.assertEqual((folder / "stderr.log").read_bytes(), b"err\n")
        self.assertEqual(len(out.splitlines()), 8)

    def test_without_prefix_the_terminal_is_theirs(self):
        out, _ = self.spawn("--nprocs", "2", "--no-prefix", *shell("echo $RANK; readlink /proc/self/fd/1"))
        pipes = {line for line in out.splitlines() if line.startswith("pipe:")}
        self.assertEqual(len(pipes), 1, "one pipe: that of this test")
        self.assertEqual(sorted(line for line in out.splitlines() if line.isdigit()), ["0", "1"])



class FailureTest(SpawnTest):
    def test_the_first_failure_gives_the_exit_code_and_the_one_summary(self):
        self.write("record.py", RECORD)
        _, err = self.spawn("--nprocs", "3", "--", "record.py", exits=3)
        self.assertEqual(err.count("failed: "), 1, err)
        self.assert_contains(err, "[rank 1] about to fail", "rank 1 failed: exit code 3", "ValueError: no good",
                             "Traceback: here", socket.gethostname(), "2 processes ended because of it")
        report = self.report()
        self.assertEqual((report["exit_code"], report["ended"], report["later"]), (3, 2, []))
        self.assertEqual(report["first"]["what"], "ValueError: no good")

    def test_all_are_started_again_as_often_as_allowed(self):
        # Rank 1 waits for rank 0's output before it fails: its failure ends rank 0, perhaps before that has printed.
        script = ("n=$TORCHELASTIC_RESTART_COUNT; echo attempt $n; [ $RANK = 0 ] && exit 0; "
                  "until grep -qs attempt logs/attempt_$n/0/stdout.log; do :; done; [ $n = 2 ] && exit 9; exit 1")
        out, err = self.spawn("--nprocs", "2", "--max-restarts", "2", "--log-dir", "logs",
                              *shell(script), exits=9)
        for attempt in range(3):
            self.assertIn(f"[rank 0] attempt {attempt}\n", out)
            self.assertTrue((self.folder / f"logs/attempt_{attempt}/1/stdout.log").exists())
        self.assert_contains(err, "rank 1", "restart 1 of 2", "restart 2 of 2", "after 2 of at most 2 restarts")
        self.assertEqual(self.report("logs")["attempt"], 2)

    def test_who_ignores_sigterm_is_killed_after_the_bound(self):
        script = "trap '' TERM; [ $RANK = 0 ] && exit 5; while :; do sleep 1000; done"
        _, err = self.spawn("--nprocs", "2", "--terminate-timeout", "0.2", *shell(script), exits=5)
        self.assertIn("1 process ended because of it", err)


class SignalTest(SpawnTest):
    def test_ctrl_c_is_forwarded(self):
        waits = shell("trap 'echo bye; exit 0' INT; echo ready; while :; do sleep 0.05; done")
        run = self.start("--nprocs", "2", "--terminate-timeout", "1000", *waits)
        self.read_lines(run, 2)
        os.kill(run.pid, signal.SIGINT)
        out, err = run.communicate()
        self.assertEqual(run.returncode, INTERRUPTED, err)
        self.assertEqual(sorted(out.splitlines()), ["[rank 0] bye", "[rank 1] bye"])
        self.assertEqual(err, "accelmgr: interrupted by SIGINT; 2 processes ended\n")
        self.assertFalse((self.folder / "accelmgr-error.json").exists())

    def test_a_second_signal_kills(self):
        run = self.start("--nprocs", "2", "--terminate-timeout", "1000",
                         *shell("trap 'echo no' TERM; echo ready; while :; do sleep 1000 & wait; done"))
        self.read_lines(run, 2)
        os.kill(run.pid, signal.SIGTERM)
        self.assertEqual(self.read_lines(run, 2), ["[rank 0] no\n", "[rank 1] no\n"])
        os.kill(run.pid, signal.SIGTERM)
        _, err = run.communicate()
        self.assertEqual(run.returncode, 128 + signal.SIGTERM, err)

    def test_nothing_is_left_when_the_agent_is_killed(self):
        session = "setsid sh -c 'echo ready; sleep 1000' &"
        run = self.start("--nprocs", "2", *shell(f"{session} trap '' TERM INT HUP; echo ready; sleep 1000"))
        self.read_lines(run, 4)
        found = descendants(run.pid)
        self.assertGreaterEqual(len(found), 5, found)  # The fork server, two ranks and their two sessions.
        run.kill()
        self.assertEqual(run.wait(), -signal.SIGKILL)
        self.wait_for_all()
        self.assertEqual([pid for pid in found if pathlib.Path(f"/proc/{pid}").exists()
                          and status_fields(pid)["State"][0] != "Z"], [])

    def test_the_launch_ends_with_its_fork_server(self):
        run = self.start("--nprocs", "2", "--terminate-timeout", "1000", *shell("echo $PPID; exec sleep 1000"))
        fork_server = {line.split()[-1] for line in self.read_lines(run, 2)}
        self.assertEqual(len(fork_server), 1)
        os.kill(int(fork_server.pop()), signal.SIGKILL)
        _, err = run.communicate(timeout=60)
        self.assertEqual(run.returncode, FAILED, err)
        self.assert_contains(err, "the fork server of the processes ended: killed by signal 9 (KILL)")


class TwoNodesTest(SpawnTest):
    """Two agents that know of each other only through their rendezvous."""

    def start_two(self, *arguments, nprocs=(1, 1)):
        address = f"127.0.0.1:{self.reserved_port()}"
        return [self.start("--nprocs", str(nprocs[node]), "--nnodes", "2", "--node-rank", str(node), "--rendezvous",
                           address, "--log-dir", f"node{node}", *arguments) for node in range(2)]

    def test_a_failure_on_one_ends_both_with_its_exit_code(self):
        script = ("echo $RANK of $WORLD_SIZE, node $GROUP_RANK; touch said$RANK; [ $RANK = 2 ] || exec sleep 1000; "
                  "until [ -e said0 ] && [ -e said1 ]; do :; done; exit 6")
        runs = self.start_two(*shell(script), nprocs=(2, 1))
        outs = []
        for run in runs:
            out, err = run.communicate()
            outs += out.splitlines()
            self.assertEqual(run.returncode, 6, err)
            self.assert_contains(err, "rank 2 failed: exit code 6", "local rank 0 of node 1",
                                 "2 processes ended because of it")
        lines = ["[rank 0] 0 of 3, node 0", "[rank 1] 1 of 3, node 0", "[rank 2] 2 of 3, node 1"]
        self.assertEqual(sorted(outs), lines)
        self.assertEqual(self.report("node0"), self.report("node1"))

    def test_an_agent_that_is_killed_ends_the_other(self):
        for victim in range(2):
            with self.subTest(victim=victim):
                runs = self.start_two(*shell("echo ready; exec sleep 1000"))
                for run in runs:
                    run.stdout.readline()
                runs[victim].kill()
                _, err = runs[1 - victim].communicate()
                self.assertEqual(runs[1 - victim].returncode, 1, err)
                told = ["node 0, which serves it, has ended", "no heartbeat of node 1 ("][victim]
                self.assert_contains(err, told, "ended because of it")
                runs[victim].communicate()
                self.wait_for_all()


class ElasticTest(SpawnTest):
    """Agents of --nnodes 2:3. Their processes run until there is a file `finish`."""

    WAITS = ("echo $RANK of $WORLD_SIZE, node $GROUP_RANK, restart $TORCHELASTIC_RESTART_COUNT; "
             "until [ -e %s ]; do sleep 0.05; done")
    END_S = 200  # More than all bounds together: 10 s without heartbeat, 30 s to meet, for each change of nodes.

    def setUp(self):
        super().setUp()
        signal.alarm(self.END_S + cli_test.WATCHDOG_S)

    def start_node(self, node, address, nprocs=1, finish="finish", restarts=3):
        return self.start("--nprocs", str(nprocs), "--nnodes", "2:3", "--node-rank", str(node), "--rendezvous", address,
                          "--rendezvous-timeout", "20", "--max-restarts", str(restarts),
                          "--log-dir", f"{finish}.node{node}", *shell(self.WAITS % finish))

    def start_three(self, **options):
        self.address = f"127.0.0.1:{self.reserved_port()}"
        return [self.start_node(node, self.address, **options) for node in range(3)]

    def expect(self, run, *lines):
        self.assertEqual(self.read_lines(run, len(lines)), [f"[rank {line[0]}] {line}\n" for line in lines])

    def assert_ends(self, run, code):
        out, err = run.communicate(timeout=self.END_S)
        self.assertEqual(run.returncode, code, out + err)
        return err

    def test_two_of_three_go_on_and_take_the_third_back(self):
        runs = self.start_three()
        for rank, run in enumerate(runs):
            self.expect(run, f"{rank} of 3, node {rank}, restart 0")
        runs[1].kill()
        self.expect(runs[0], "0 of 2, node 0, restart 1")
        self.expect(runs[2], "1 of 2, node 1, restart 1")
        runs[1].communicate()
        runs[1] = self.start_node(1, self.address, nprocs=2)
        self.expect(runs[0], "0 of 4, node 0, restart 2")
        self.expect(runs[1], "1 of 4, node 1, restart 2", "2 of 4, node 1, restart 2")
        self.expect(runs[2], "3 of 4, node 2, restart 2")
        (self.folder / "finish").touch()
        err = [self.assert_ends(run, DONE) for run in runs]
        self.assert_contains(err[2], "no heartbeat of node 1 (", "restart 1 of 3", "came; restart 2 of 3")
        self.wait_for_all()

    def test_memory_of_one_node_is_only_for_a_world_of_one_node(self):
        address = f"127.0.0.1:{self.reserved_port()}"
        script = "echo \"$WORLD_SIZE ${ACCELMGR_WORLD_MEMORY:+memory}\"; until [ -e finish ]; do sleep 0.05; done"
        runs = []
        for node, (lines, wait) in enumerate(((["2 memory"] * 2, "1"), (["4 "] * 2, "20"))):
            runs.append(self.start("--nprocs", "2", "--nnodes", "1:2", "--node-rank", str(node), "--rendezvous",
                                   address, "--rendezvous-timeout", wait, "--max-restarts", "1", "--no-prefix",
                                   "--log-dir", f"node{node}", *shell(script)))
            self.assertEqual(self.read_lines(runs[node], 2), [line + "\n" for line in lines])
        self.assertEqual(self.read_lines(runs[0], 2), ["4 \n"] * 2)
        (self.folder / "finish").touch()
        for run in runs:
            self.assert_ends(run, DONE)

    def test_without_a_restart_a_loss_is_the_end(self):
        runs = self.start_three(restarts=0)
        for rank, run in enumerate(runs):
            self.expect(run, f"{rank} of 3, node {rank}, restart 0")
        runs[2].kill()
        for run in runs[:2]:
            self.assertIn("no heartbeat of node 2", self.assert_ends(run, 1))
        runs[2].communicate()
        self.wait_for_all()

    def test_random_kills_never_make_it_hang_or_leave_a_process(self):
        launches = [RandomKills(self, seed) for seed in range(3)]
        for _ in range(4):
            for launch in launches:  # Each one's nodes are lost while the test waits for another one's.
                launch.disturb()
        for seed, launch in enumerate(launches):
            (self.folder / launch.finish).touch()
            for run in launch.all_runs:
                with self.subTest(seed=seed):
                    out, err = run.communicate(timeout=self.END_S)
                    self.assertIn(run.returncode, (DONE, FAILED, -signal.SIGKILL, 128 + signal.SIGKILL), out + err)
        self.wait_for_all()


class RandomKills:
    """Kills launchers and ranks of a launch of three nodes, and starts launchers again."""

    def __init__(self, test, seed):
        self.chance, self.finish, self.all_runs = random.Random(seed), f"finish{seed}", []
        address = f"127.0.0.1:{test.reserved_port()}"

        def start(node):
            self.all_runs.append(test.start_node(node, address, finish=self.finish, restarts=100))
            return self.all_runs[-1]
        self.start = start
        self.runs = [start(node) for node in range(3)]

    def disturb(self):
        # Every deed begins a new world or ends node 0: there is a line or an end to read.
        if self.chance.random() < 0.7:
            self.runs[0].stdout.readline()
        node = self.chance.choices((0, 1, 2), (1, 8, 8))[0]
        if self.runs[node] is None:
            self.runs[node] = self.start(node)
        elif self.chance.random() < 0.3:
            for pid in descendants(self.runs[node].pid):
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
        else:
            self.runs[node].kill()
            if node > 0:
                self.runs[node] = None if self.chance.random() < 0.5 else self.start(node)


class TwoNamespacesTest(SpawnTest):
    def assert_say(self, timeout_s, nodes, expected):
        """Runs a command on each of two nodes, and expects these lines."""
        done = subprocess.run([sys.executable, TWO_NODES, "--timeout", str(timeout_s), "--node", "alpha", *nodes[0],
                               "--node", "beta", *nodes[1]], text=True, capture_output=True, check=False,
                              cwd=self.folder, env=cli_test.environment())
        if done.returncode == NO_NAMESPACES:
            self.skipTest(done.stderr)
        self.assertEqual(done.returncode, DONE, done.stdout + done.stderr)
        self.assertEqual(sorted(done.stdout.splitlines()), expected, done.stderr)

    def test_a_node_whose_network_is_cut_ends_and_the_other_goes_on(self):
        script = ("if [ $TORCHELASTIC_RESTART_COUNT = 1 ]; then echo $RANK of $WORLD_SIZE; exit 0; fi; "
                  "touch said$RANK; [ $RANK = 1 ] || { until [ -e said1 ]; do sleep 0.05; done; "
                  f"{sys.executable} {TWO_NODES} --link down; }}; exec sleep 1000")

        def command(node):
            return ["sh", "-c", '"$@"; echo node $0 ended with $?', str(node), cli_test.PROGRAM, "spawn", "--nprocs",
                    "1", "--nnodes", "1:2", "--node-rank", str(node), "--rendezvous", "10.77.0.1:29500",
                    "--max-restarts", "1", "--log-dir", f"node{node}", *shell(script)]
        self.assert_say(150, [command(0), command(1)],
                        ["[rank 0] 0 of 1", "node 0 ended with 0", "node 1 ended with 1"])

    def test_a_script_of_torch_distributed_runs_over_two_nodes(self):
        def command(node, nprocs):
            return ["sh", "-c", ('export GLOO_SOCKET_IFNAME=$(ip -o address | sed -n "s/^[0-9]*: *\\([^ ]*\\).* '
                                 '$TWO_NODES_ADDRESS\\/.*/\\1/p"); exec "$@"'), "sh", cli_test.PROGRAM, "spawn",
                    "--nprocs", str(nprocs), "--nnodes", "2", "--node-rank", str(node),
                    "--rendezvous", "10.77.0.1:29500", "--", TORCH_PROGRAM]
        self.assert_say(240, [command(0, 2), command(1, 1)],
                        [f"[rank {rank}] rank {rank} of 3: sum 6.0" for rank in range(3)])


if __name__ == "__main__":
    cli_test.PROGRAM = os.path.abspath(sys.argv.pop(1))
    cli_test.become_subreaper()
    # Makes `python3` the Python of the build, in the launched processes too.
    os.environ["PATH"] = f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"
    unittest.main(verbosity=2)
