"""Tests of `accelmgr serve` and of the commands that ask it: serve_cli_test.py PROGRAM [unittest arguments]."""
import http.client
import json
import os
import pathlib
import re
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
import unittest
import urllib.error
import urllib.request

from cli_test import environment

PROGRAM = ""

DONE, FAILED, USAGE = 0, 1, 2
WATCHDOG_S = 60  # Longer than any test takes on a loaded machine; only a failing test gets here.

SMALL = """\
nprocs: 2
batch_size_per_device: 4
runners: {threads: 1}
model: {kind: mlp, mlp: {input_size: 16, hidden_size: 32}}
"""


class ServiceTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.socket = self.folder / "socket"
        self.configuration = self.folder / "run.yaml"
        self.configuration.write_text(SMALL)

    def command(self, *arguments):
        return ["serve", "--config", str(self.configuration), "--socket", str(self.socket), *arguments]

    def start(self, *command, extra=None, **streams):
        """Starts the program, which does not outlive the test."""
        process = subprocess.Popen([PROGRAM, *command], text=True, env=environment(extra), **streams)
        for stream in (process.stdout, process.stderr):
            if stream:
                self.addCleanup(stream.close)
        self.addCleanup(process.wait, WATCHDOG_S)
        self.addCleanup(process.kill)
        return process

    def serve(self, *arguments, extra=None, errors=None):
        with open(errors or os.devnull, "w") as stderr:
            process = self.start(*self.command(*arguments), extra=extra, stdout=subprocess.PIPE,
                                 stderr=stderr if errors else None)
        self.ready = process.stdout.readline()
        self.assertRegex(self.ready, r"^ready: model 'mlp', 2 runners, process \d+, socket ")
        return process

    def run_program(self, *arguments, extra=None):
        return subprocess.run([PROGRAM, *arguments], capture_output=True, text=True, timeout=WATCHDOG_S,
                              env=environment(extra))

    def ask(self, *arguments):
        return self.run_program(*arguments, "--socket", str(self.socket))

    def status(self):
        return json.loads(self.ask("status", "--json").stdout)

    def connection(self):
        connection = http.client.HTTPConnection("localhost", timeout=WATCHDOG_S)
        connection.sock = socket.socket(socket.AF_UNIX)
        self.addCleanup(connection.close)
        connection.sock.settimeout(WATCHDOG_S)
        connection.sock.connect(str(self.socket))
        return connection

    def request(self, method, target, header):
        """Status and JSON of the answer."""
        connection = self.connection()
        connection.request(method, target, headers=header)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())

    def get(self, target):
        connection = self.connection()
        connection.request("GET", target)
        return connection.getresponse()

    def token_file(self, token):
        """A file for --token-file."""
        file = self.folder / "token"
        file.touch(0o600)
        file.write_text(token + "\n")
        return str(file)

    def end(self, process, number=signal.SIGTERM):
        process.send_signal(number)
        self.assertEqual(process.wait(WATCHDOG_S), DONE)
        self.assertFalse(self.socket.exists())


class Serve(ServiceTest):
    def test_no_command_waits_for_a_stopped_service(self):
        process = self.serve()
        process.send_signal(signal.SIGSTOP)
        commands = ("step --timeout 1", "step", "checkpoint --timeout 1", "resize 2", "status")
        running = [self.start(*command.split(), "--socket", str(self.socket), stdout=subprocess.DEVNULL,
                              stderr=subprocess.PIPE) for command in commands]
        for one in running:
            _, error = one.communicate(timeout=WATCHDOG_S)
            self.assertEqual(one.returncode, FAILED, one.args)
            self.assertIn("did not answer in time", error)
        process.send_signal(signal.SIGCONT)

    def test_a_service_is_asked_and_steps_and_stops(self):
        process = self.serve()
        self.assertEqual(stat.S_IMODE(self.socket.stat().st_mode), 0o600)
        status = self.status()
        self.assertEqual((status["ready"], status["host"], status["steps"]), (True, None, 0))
        self.assertEqual([runner["state"] for runner in status["runners"]], ["ready", "ready"])
        step = self.ask("step", "--count", "2")
        self.assertEqual((step.returncode, step.stderr), (DONE, ""))
        self.assertRegex(step.stdout, r"^step 1: loss [\d.]+, 8 samples, [\d.]+ ms\nstep 2: loss ")
        self.assertEqual(json.loads(self.ask("step", "--json").stdout)["steps"][0]["step"], 3)
        self.assertRegex(self.ask("status").stdout, r"(?m)^steps +3 of 3 attempts, 24 samples$")
        self.assertEqual(self.ask("stop").returncode, DONE)
        self.assertEqual(process.wait(WATCHDOG_S), DONE)
        self.assertFalse(self.socket.exists())

    def test_signals_end_it(self):
        for number in (signal.SIGTERM, signal.SIGINT):
            self.end(self.serve(), number)

    def test_systemd_is_told(self):
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.addCleanup(listener.close)
        listener.settimeout(WATCHDOG_S)
        listener.bind(str(self.folder / "notify"))
        process = self.serve(extra={"NOTIFY_SOCKET": str(self.folder / "notify")})
        self.assertRegex(listener.recv(4096).decode(), r"^READY=1\nSTATUS=serves model 'mlp' with 2 runners$")
        self.end(process)
        self.assertEqual(listener.recv(4096), b"STOPPING=1")

    def test_the_team_and_single_runners_are_changed(self):
        process = self.serve("--set", "runners.max_runners=3")
        resized = self.ask("resize", "3")
        self.assertEqual((resized.returncode, resized.stderr), (DONE, ""))
        self.assertRegex(resized.stdout, r"(?m)^runner 2 +\w+, pid \d+, phase ")
        self.assertEqual(json.loads(self.ask("step", "--json").stdout)["steps"][0]["participants"], 3)
        before = self.status()["runners"][1]["pid"]
        self.assertEqual(self.ask("restart", "1").returncode, DONE)
        self.assertEqual(self.ask("step").returncode, DONE)
        self.assertNotEqual(self.status()["runners"][1]["pid"], before)
        self.assertEqual(self.ask("resize", "4").returncode, FAILED)
        self.assertIn("it is not in the team", self.ask("restart", "7").stderr)
        self.assertEqual(self.ask("resize").returncode, USAGE)
        self.end(process)

    def test_its_configuration_is_read_again(self):
        process = self.serve("--set", "runners.max_runners=3", errors=self.folder / "errors")
        said = self.folder / "errors"

        def reload(changes, expected):
            before = said.stat().st_size
            self.configuration.write_text(SMALL + changes)
            process.send_signal(signal.SIGHUP)
            deadline = time.monotonic() + WATCHDOG_S
            while expected not in said.read_text()[before:]:
                self.assertLess(time.monotonic(), deadline, said.read_text()[before:])
                self.ask("status")

        reload("step_timeout: 7\nseed_base: 5\n", "SIGHUP: seed_base 42 -> 5 needs another start of the service")
        self.assertRegex(said.read_text(), r"\[service step \d+\] SIGHUP: step_timeout 300 -> 7\n")
        self.assertIn('"step_timeout": 7\n', self.get("/v1/config").read().decode())
        self.assertIn('"seed_base": 42\n', self.get("/v1/config").read().decode())
        reload("step_timeout: 7\nseed_base: 5\n", "SIGHUP: nothing changes")
        reload("step_timeouts: 8\n", "SIGHUP: the configuration stays as it is: ")
        self.assertIn("did you mean 'step_timeout'?", said.read_text())
        self.configuration.unlink()
        os.mkfifo(self.configuration)
        before = said.stat().st_size
        process.send_signal(signal.SIGHUP)
        while "is no regular file" not in said.read_text()[before:]:
            self.assertEqual(self.ask("status").returncode, DONE)
        self.configuration.unlink()
        self.configuration.write_text(SMALL.replace("nprocs: 2", "nprocs: 3"))
        process.send_signal(signal.SIGHUP)
        while len(self.status()["runners"]) < 3:
            pass
        self.assertEqual(json.loads(self.ask("step", "--json").stdout)["steps"][0]["participants"], 3)
        self.end(process)

    def test_it_goes_on_from_the_last_good_checkpoint_and_keeps_a_damaged_one(self):
        checkpoints = self.folder / "checkpoints"
        arguments = ["--set", f"checkpoint.directory={checkpoints}", "--set", "checkpoint.keep=2",
                     "--set", "checkpoint.resume=latest"]
        process = self.serve(*arguments)
        self.ask("step", "--count", "2")
        self.ask("checkpoint")
        before = self.status()
        self.ask("step")
        self.end(process)
        damaged = checkpoints / "step-00000003" / "model.safetensors"
        damaged.write_bytes(damaged.read_bytes()[:100])
        process = self.serve(*arguments, errors=self.folder / "errors")
        self.assertIn(f", after step 2 of '{checkpoints}/step-00000002'\n", self.ready)
        said = (self.folder / "errors").read_text()
        self.assertRegex(said, r"model.safetensors' is torn")
        self.assertIn(f"is kept as '{checkpoints}/step-00000003.unreadable'", said)
        for name in ("steps", "elements", "run_id"):
            self.assertEqual(self.status()[name], before[name])
        self.ask("step")
        self.end(process)
        self.assertEqual(sorted(path.name for path in checkpoints.glob("step-*")),
                         ["step-00000002", "step-00000003", "step-00000003.unreadable"])

    def test_a_checkpoint_is_written_when_it_is_asked_for(self):
        process = self.serve()
        refused = self.ask("checkpoint")
        self.assertEqual(refused.returncode, FAILED)
        self.assertIn("checkpoint.directory", refused.stderr)
        self.end(process)
        process = self.serve("--set", f"checkpoint.directory={self.folder / 'checkpoints'}")
        self.ask("step")
        written = self.ask("checkpoint")
        self.assertEqual((written.returncode, written.stderr), (DONE, ""))
        self.assertRegex(written.stdout, r"^step 1: .*/checkpoints/step-\w+ \([\d.]+ MiB, \d+ ms\)\n$")
        self.end(process)

    def test_over_tcp_it_answers_those_who_state_the_token(self):
        token = self.token_file("0123456789abcdef")
        process = self.serve("--http", ":0", "--token-file", token)
        url = self.ready.rpartition(", ")[2].strip()
        self.assertRegex(url, r"^http://127\.0\.0\.1:\d+$")

        def ask(path, head=None):
            request = urllib.request.Request(url + path, headers=head or {})
            try:
                answer = urllib.request.urlopen(request, timeout=WATCHDOG_S)
            except urllib.error.HTTPError as error:
                answer = error
            with answer:
                return answer.status, answer.read()

        def asked(path, head=None):
            return ask(path, head)[0]

        def problem(head):
            return json.loads(ask("/v1/observe", head)[1])["error"]

        right = {"Authorization": "Bearer 0123456789abcdef"}
        self.assertEqual(asked("/v1/status", right), 200)
        self.assertEqual(asked("/v1/attach", {**right, "Upgrade": "accelmgr-host"}), 409)
        observer = {**right, "Upgrade": "accelmgr-observer"}
        build = problem(observer)["message"].split("'")[-2]
        self.assertEqual(problem({**observer, "Accelmgr-Build": build})["code"], "no_unix_socket")
        self.assertEqual(asked("/healthz"), 200)
        self.assertEqual(asked("/"), 200)  # The dashboard has no data.
        for path in ("/v1/status", "/v1/status?token=0123456789abcdef", "/metrics", "/nothing", "/v1/step"):
            self.assertEqual(asked(path), 401, path)
        self.assertEqual(asked("/v1/status", {"Authorization": "Bearer 0123456789abcdeF"}), 401)
        self.assertEqual(asked("/v1/status?token=0123456789abcdef", right), 400)
        shown = pathlib.Path(f"/proc/{process.pid}/cmdline").read_bytes() + self.ready.encode()
        self.assertNotIn(b"0123456789abcdef", shown)
        self.assertTrue(self.status()["ready"])
        self.end(process)

    def test_a_web_page_that_reaches_the_socket_changes_nothing(self):
        process = self.serve()
        page = {"Host": "localhost:8080", "Origin": "http://evil.example"}
        own = {"Host": "localhost:8080", "Origin": "http://localhost:8080"}
        status, answer = self.request("POST", "/v1/step", page)
        self.assertEqual((status, answer["error"]["code"]), (403, "other_site"))
        self.assertEqual(self.status()["attempts"], 0)
        self.assertEqual(self.request("POST", "/v1/step", own)[0], 200)
        self.end(process)

    def test_subscribers_that_have_left_keep_nobody_out(self):
        token = self.token_file("0123456789abcdef")
        self.serve("--http", ":0", "--token-file", token)
        port = int(re.search(r":(\d+)", self.ready.rpartition("socket")[2]).group(1))
        request = b"GET /v1/events HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer 0123456789abcdef\r\n\r\n"

        def subscribe():
            while True:
                connection = socket.create_connection(("127.0.0.1", port), WATCHDOG_S)
                connection.sendall(request)
                answer = connection.recv(12)
                if answer.endswith(b" 503"):
                    return connection, answer
                if answer.endswith(b" 200"):  # What is not read would make closing an abort, which TCP tells of.
                    text = b""
                    while b"event: host" not in text or not text.endswith(b"\n\n"):
                        text += connection.recv(4096)
                    return connection, answer
                connection.close()  # 429: too many requests in a second.

        left = [subscribe() for _ in range(100)]
        self.assertEqual({answer for _, answer in left}, {b"HTTP/1.1 200"})
        for connection, _ in left:
            connection.close()
        answer = b""
        while not answer.endswith(b" 200"):  # No step is made meanwhile.
            connection, answer = subscribe()
            connection.close()

    def test_tcp_and_a_token_are_for_each_other(self):
        for option in (["--http", ":0"], ["--token-file", "/dev/null"]):
            refused = self.run_program(*self.command(*option))
            self.assertEqual(refused.returncode, USAGE)
            self.assertIn("--http and --token-file are for each other", refused.stderr)
        self.assertFalse(self.socket.exists())

    def serve_named(self, *name):
        process = self.start("serve", "--config", str(self.configuration), *name, extra=self.runtime,
                             stdout=subprocess.PIPE)
        self.ready = process.stdout.readline()
        return process

    def test_sessions_have_names(self):
        self.runtime = {"XDG_RUNTIME_DIR": str(self.folder)}
        said = self.run_program("list", extra=self.runtime)
        self.assertEqual((said.returncode, said.stdout), (DONE, ""))
        self.assertIn("no service of this user", said.stderr)
        processes = {}
        for name in ("", "gpt", "lstm-2.b_c"):
            processes[name] = self.serve_named(*(["--socket", name] if name else []))
            self.assertIn(f"socket {self.folder}/accelmgr{'-' + name if name else ''}.sock", self.ready)
        self.assertEqual(self.run_program("step", "--socket", "gpt", extra=self.runtime).returncode, DONE)
        listed = json.loads(self.run_program("list", "--json", extra=self.runtime).stdout)
        self.assertEqual([(one["name"], one["status"]["pid"], one["status"]["steps"]) for one in listed],
                         [(name, process.pid, int(name == "gpt")) for name, process in processes.items()])
        shown = self.run_program("list", extra=self.runtime).stdout.splitlines()
        self.assertRegex(shown[1], rf"^gpt +process {processes['gpt'].pid}, 2 runners, 1 steps, ready: mlp on ")
        self.assertEqual(shown[0].split()[0], "-")
        processes["gpt"].kill()
        processes["gpt"].wait(WATCHDOG_S)
        self.assertTrue((self.folder / "accelmgr-gpt.sock").exists())
        listed = json.loads(self.run_program("list", "--json", extra=self.runtime).stdout)
        self.assertEqual([one["name"] for one in listed], ["", "lstm-2.b_c"])
        for name in ("", "lstm-2.b_c"):
            self.assertEqual(self.run_program("stop", "--socket", name, extra=self.runtime).returncode, DONE)
            self.assertEqual(processes[name].wait(WATCHDOG_S), DONE)

    def test_what_is_no_name_of_a_session_is_refused(self):
        runtime = {"XDG_RUNTIME_DIR": str(self.folder)}
        for command in (["status"], ["serve", "--config", str(self.configuration)], ["top"], ["trace"], ["events"]):
            said = self.run_program(*command, "--socket", "run.sock", extra=runtime)
            self.assertEqual(said.returncode, USAGE)
            self.assertIn("'run.sock' without a slash is the name of a session; as a path it is './run.sock'",
                          said.stderr)
        said = self.run_program("status", "--socket", "a b", extra=runtime)
        self.assertEqual(said.returncode, USAGE)
        self.assertIn("'a b' is no name of a session, which has letters, digits, '.', '_' and '-' alone", said.stderr)
        nowhere = {"XDG_RUNTIME_DIR": ""}
        for command in (["list"], ["status"], ["status", "--socket", "gpt"]):
            said = self.run_program(*command, extra=nowhere)
            self.assertEqual(said.returncode, USAGE)
            self.assertIn("XDG_RUNTIME_DIR is not set", said.stderr)

    def test_what_is_wrong_is_said(self):
        missing = self.ask("status")
        self.assertEqual(missing.returncode, FAILED)
        self.assertIn("no service can be reached at", missing.stderr)
        self.configuration.write_text("model: {kind: nothing}\n")
        wrong = self.run_program(*self.command())
        self.assertEqual(wrong.returncode, USAGE)
        self.assertIn("nothing", wrong.stderr)
        self.assertFalse(self.socket.exists())


if __name__ == "__main__":
    PROGRAM = sys.argv.pop(1)
    unittest.main()
