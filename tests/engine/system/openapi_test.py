"""Checks that a service does what GET /openapi.json says: openapi_test.py PROGRAM [unittest arguments].

Schemathesis makes requests of that description, right ones and wrong ones, and checks the answers against it.
"""
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest
import urllib.request

PROGRAM = ""
WATCHDOG_S = 400  # Longer than it takes on a loaded machine; only a failing test gets here.

CONFIGURATION = """\
nprocs: 2
batch_size_per_device: 4
runners: {threads: 1, max_runners: 3}
model: {kind: mlp, mlp: {input_size: 16, hidden_size: 32}}
"""
TOKEN = "0123456789abcdef"


class OpenApi(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        (self.folder / "run.yaml").write_text(CONFIGURATION)
        (self.folder / "token").write_text(TOKEN)
        (self.folder / "token").chmod(0o600)
        own = {name: value for name, value in os.environ.items() if not name.startswith("ACCELMGR_")}
        self.errors = (self.folder / "errors").open("w")
        self.addCleanup(self.errors.close)
        self.service = subprocess.Popen(
            [PROGRAM, "serve", "--config", "run.yaml", "--socket", "./socket", "--http", ":0", "--token-file", "token",
             "--set", "checkpoint.directory=checkpoints"],
            stdout=subprocess.PIPE, stderr=self.errors, text=True, cwd=self.folder, env=own)
        self.addCleanup(self.service.wait, WATCHDOG_S)
        self.addCleanup(self.service.stdout.close)
        self.addCleanup(self.service.kill)
        self.url = self.service.stdout.readline().rpartition(", ")[2].strip()
        self.assertTrue(self.url.startswith("http://127.0.0.1:"))

    def ask(self, path):
        request = urllib.request.Request(self.url + path, headers={"Authorization": "Bearer " + TOKEN})
        with urllib.request.urlopen(request, timeout=WATCHDOG_S) as answer:
            return answer.read().decode()

    def test_answers_are_as_described(self):
        command = [sys.executable, "-m", "schemathesis.cli", "run", self.url + "/openapi.json",
                   "--header", "Authorization: Bearer " + TOKEN,
                   # The first ends the service, the answer of the second never ends, and what the third takes is the
                   # `next` of its own answers.
                   "--exclude-path", "/v1/stop", "--exclude-path", "/v1/events", "--exclude-path", "/v1/trace",
                   # A step whose time is over before it begins is a 504. Errors of the service are looked for below.
                   "--exclude-checks", "not_a_server_error",
                   "--phases", "examples,coverage,fuzzing", "--max-examples", "15", "--seed", "1", "--no-color",
                   "--generation-database", ":memory:", "--request-timeout", "60", "--max-failures", "5"]
        run = subprocess.run(command, capture_output=True, text=True, timeout=WATCHDOG_S, cwd=self.folder)
        self.assertEqual(run.returncode, 0, run.stdout + run.stderr)
        self.assertIn("13 selected", run.stdout)
        self.assertTrue(json.loads(self.ask("/v1/status"))["ready"])
        self.assertNotIn("was not served", (self.folder / "errors").read_text())


if __name__ == "__main__":
    PROGRAM = os.path.abspath(sys.argv.pop(1))
    if importlib.util.find_spec("schemathesis") is None:
        print("skipped: this Python has no schemathesis")
        sys.exit(77)
    unittest.main()
