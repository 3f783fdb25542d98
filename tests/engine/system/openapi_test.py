"""Checks that a service does what GET /openapi.json says: openapi_test.py PROGRAM [unittest arguments].

Schemathesis makes requests of that description, right ones and wrong ones, and checks the answers against it.
"""
import importlib.util
import json
import os
import subprocess
import sys
import unittest
import urllib.request

import serve_cli_test
from serve_cli_test import ServiceTest

WATCHDOG_S = 400  # Longer than it takes on a loaded machine; only a failing test gets here.

TOKEN = "0123456789abcdef"


class OpenApi(ServiceTest):
    def setUp(self):
        super().setUp()
        self.serve("--set", "runners.max_runners=3", "--set", f"checkpoint.directory={self.folder / 'checkpoints'}",
                   "--http", ":0", "--token-file", self.token_file(TOKEN), errors=self.folder / "errors")
        self.url = self.ready.rpartition(", ")[2].strip()
        self.assertTrue(self.url.startswith("http://127.0.0.1:"))

    def read(self, path):
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
        self.assertIn("15 selected", run.stdout)
        self.assertTrue(json.loads(self.read("/v1/status"))["ready"])
        self.assertNotIn("was not served", (self.folder / "errors").read_text())


if __name__ == "__main__":
    serve_cli_test.PROGRAM = os.path.abspath(sys.argv.pop(1))
    if importlib.util.find_spec("schemathesis") is None:
        print("skipped: this Python has no schemathesis")
        sys.exit(77)
    unittest.main()
