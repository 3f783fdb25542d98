"""Tests of how a service is watched: watch_cli_test.py PROGRAM [unittest arguments].

Metrics are read by the official client of Prometheus, where it is installed.
"""
import base64
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import unittest

import serve_cli_test
from serve_cli_test import DONE, FAILED, USAGE, WATCHDOG_S, ServiceTest

try:
    from prometheus_client import parser
except ImportError:
    parser = None

SEVEN_STEPS = ["--set", "data.elements=56", "--set", "data.epochs=1"]
PARTS = {"duration": "step_ms", "compute": "compute_ms", "reduce": "reduce_ms", "wait": "wait_ms", "data": "data_ms"}


class Metrics:
    def __init__(self, text):
        self.families = {}
        self.samples = {}
        for family in parser.text_string_to_metric_families(text):
            assert family.name not in self.families, f"{family.name} is there twice"
            self.families[family.name] = family
            for sample in family.samples:
                key = (sample.name, tuple(sorted(sample.labels.items())))
                assert key not in self.samples, f"{key} is there twice"
                self.samples[key] = sample.value

    def __getitem__(self, name):
        return self.samples[f"accelmgr_{name}", ()]

    def labelled(self, name, label):
        """The values by the label, which is the only one."""
        found = {dict(labels)[label]: value for (sample, labels), value in self.samples.items()
                 if sample == f"accelmgr_{name}"}
        assert found, f"there is no {name}"
        return found


class Watch(ServiceTest):
    def metrics(self):
        return Metrics(self.get("/metrics").read().decode())

    def events(self, *arguments):
        return self.start("events", "--socket", str(self.socket), *arguments, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE)

    @unittest.skipIf(parser is None, "prometheus-client is not installed")
    def test_metrics_are_what_the_steps_were(self):
        process = self.serve(*SEVEN_STEPS)
        self.assertEqual(self.get("/metrics").getheader("Content-Type"), "text/plain; version=0.0.4; charset=utf-8")
        filled = self.status()
        while any(runner["queued_batches"] < runner["queue_slots"] for runner in filled["runners"]):
            filled = self.status()
        before = self.metrics()
        slots = filled["runners"][0]["queue_slots"]
        self.assertGreater(slots, 0)
        self.assertEqual(before.labelled("queue_batches", "rank"), {"0": slots, "1": slots})
        self.assertNotIn("accelmgr_loss", before.families)
        self.assertEqual(before["step_duration_seconds_count"], 0)
        made = json.loads(self.ask("step", "--json", "--count", "7").stdout)["steps"]
        self.assertEqual(self.ask("step").returncode, FAILED)
        metrics = self.metrics()
        status = self.status()
        self.assertEqual(metrics.labelled("steps_total", "status"),
                         {"ok": 7, "data_end": 1, "timeout": 0, "runner_lost": 0, "nonfinite": 0, "manager_lost": 0})
        self.assertEqual(metrics["committed_steps_total"], status["steps"])
        self.assertEqual(metrics["samples_total"], sum(step["samples"] for step in made))
        self.assertAlmostEqual(metrics["loss"], made[-1]["loss"])
        for part, field in PARTS.items():
            seconds = [step[field] / 1e3 for step in made]
            name = f"step_{part}_seconds"
            self.assertEqual(metrics[name + "_count"], len(seconds))
            self.assertAlmostEqual(metrics[name + "_sum"], sum(seconds), places=7)
            for bound, count in metrics.labelled(name + "_bucket", "le").items():
                self.assertEqual(count, sum(value <= float(bound) for value in seconds), f"{name} up to {bound} s")
        ranks = {"0", "1"}
        for name in ("queue_batches", "runner_ready", "runner_heartbeat_age_seconds"):
            self.assertEqual(set(metrics.labelled(name, "rank")), ranks, name)
        self.assertEqual(metrics.labelled("queue_batches", "rank"), {"0": 0, "1": 0})
        self.assertEqual([runner["queued_batches"] for runner in status["runners"]], [0, 0])
        self.assertEqual([runner["silent_s"] for runner in filled["runners"]], [0, 0])
        self.assertEqual(set(metrics.labelled("process_private_bytes", "process")), {"manager", "runner 0", "runner 1"})
        self.assertGreater(min(metrics.labelled("process_private_bytes", "process").values()), 1 << 20)
        self.assertEqual((status["version"], status["max_runners"]), (self.version(), 2))
        self.assertIsNone(status["checkpoint_directory"])
        self.assertEqual(metrics.labelled("build_info", "version"), {self.version(): 1})
        for name, value in {"ready": 1, "host_attached": 0, "incidents_total": 0, "runner_restarts_total": 0,
                            "session_bytes": status["session_bytes"],
                            "parameter_version": status["parameter_version"]}.items():
            self.assertEqual(metrics[name], value, name)
        self.assertTrue(all(family.type != "unknown" and family.documentation for family in metrics.families.values()))
        self.end(process)

    def version(self):
        return self.run_program("--version").stdout.split()[-1]

    @unittest.skipIf(parser is None, "prometheus-client is not installed")
    def test_a_lost_runner_is_in_metrics_and_events(self):
        process = self.serve()
        events = self.events("--json")
        self.assertEqual(json.loads(events.stdout.readline())["event"], "host")
        os.kill(self.status()["runners"][1]["pid"], signal.SIGKILL)
        incident = json.loads(events.stdout.readline())
        self.assertEqual((incident["event"], incident["id"]), ("incident", "0.1"))
        self.assertEqual((incident["data"]["rank"], incident["data"]["exit"]), (1, "killed by signal 9 (KILL)"))
        self.assertEqual(self.ask("step").returncode, DONE)
        metrics = self.metrics()
        self.assertEqual((metrics["incidents_total"], metrics["runner_restarts_total"]), (1, 1))
        self.end(process)

    # dashboard_test.py has what it shows in a browser.
    def test_the_dashboard_may_run_and_reach_nothing_but_its_own(self):
        process = self.serve()
        answer = self.get("/")
        self.assertEqual((answer.status, answer.getheader("Content-Type")), (200, "text/html; charset=utf-8"))
        page = answer.read().decode()
        self.assertTrue(page.startswith("<!doctype html>") and page.endswith("</html>\n"))
        hashes = {}
        for tag in ("style", "script"):
            (text,) = re.findall(rf"<{tag}[^>]*>(.*?)</{tag}>", page, re.DOTALL)
            self.assertGreater(len(text), 1000)
            hashes[tag] = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        policy = answer.getheader("Content-Security-Policy").split("; ")
        self.assertEqual(sorted(policy), sorted([
            "default-src 'none'", f"style-src 'sha256-{hashes['style']}'", f"script-src 'sha256-{hashes['script']}'",
            "connect-src 'self'", "img-src data:", "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'",
            "require-trusted-types-for 'script'"]))
        self.assertEqual((answer.getheader("X-Content-Type-Options"), answer.getheader("Referrer-Policy")),
                         ("nosniff", "no-referrer"))
        self.assertNotRegex(page, r"https?://(?!www\.w3\.org/2000/svg|html\.spec\.whatwg\.org/)")
        self.assertEqual(self.get("/?token=x").status, 400)
        self.end(process)

    def test_events_are_lines_until_the_service_ends(self):
        process = self.serve(*SEVEN_STEPS)
        events = self.events()
        self.assertEqual(events.stdout.readline(), "host: none\n")
        self.assertEqual(self.ask("step", "--count", "7").returncode, DONE)
        self.assertRegex(events.stdout.readline(), r"^step 1: loss [\d.]+, 8 samples, [\d.]+ ms$")
        for number in range(2, 8):
            self.assertRegex(events.stdout.readline(), f"^step {number}: ")
        self.assertEqual(self.ask("step").returncode, FAILED)
        self.assertRegex(events.stdout.readline(), r"^step 8 does not count: data_end, [\d.]+ ms$")
        again = self.events("--since", "6")
        self.assertEqual(again.stdout.readline(), "host: none\n")
        self.assertRegex(again.stdout.readline(), "^step 7: ")
        again.send_signal(signal.SIGINT)
        self.assertEqual(again.wait(WATCHDOG_S), -signal.SIGINT)
        self.end(process)
        self.assertEqual(events.stdout.read(), "the service ends: signal 15\n")
        self.assertEqual((events.wait(WATCHDOG_S), events.stderr.read()), (DONE, ""))

    def test_a_killed_service_is_no_orderly_end(self):
        process = self.serve()
        events = self.events()
        events.stdout.readline()
        process.kill()
        self.assertEqual(events.wait(WATCHDOG_S), FAILED)
        self.assertIn("was killed", events.stderr.read())

    def test_what_is_wrong_is_said(self):
        self.assertIn("no service can be reached at", self.ask("events").stderr)
        self.assertEqual(self.ask("events", "--since", "x").returncode, USAGE)
        process = self.serve()
        answer = self.ask("events", "--since", "1.2.3")
        self.assertEqual(answer.returncode, FAILED)
        self.assertIn("since is '2.3'; it must be a whole number", answer.stderr)
        self.end(process)


class Top(ServiceTest):
    def test_it_shows_what_the_service_does(self):
        process = self.serve()
        self.ask("step", "--count", "5")
        top = self.ask("top", "--count", "2", "--interval", "0.05")
        self.assertEqual((top.returncode, top.stderr), (DONE, ""))
        self.assertEqual(top.stdout.count("accelmgr  model 'mlp'"), 2)
        self.assertRegex(top.stdout, r"(?m)^steps     5 of 5 attempts, 40 samples, ")
        self.assertRegex(top.stdout, r"(?m)^loss      [\d.]+ +[\u2581-\u2588]{5}$")
        self.assertRegex(top.stdout, r"(?m)^1      ready     waiting +\d+ +\d+/\d+ +[\d.]+ s +20$")
        self.assertNotIn("\x1b", top.stdout)
        views = [json.loads(line) for line in self.ask("top", "--json", "--count", "2", "--interval", "0.05")
                 .stdout.splitlines()]
        self.assertEqual([len(view["steps"]) for view in views], [5, 0])
        self.assertEqual(views[1]["status"]["steps"], 5)
        self.end(process)

    def test_a_terminal_is_left_as_it_was(self):
        process = self.serve()
        for ends in ("interrupt", "service"):
            ours, theirs = os.openpty()
            top = self.start("top", "--socket", str(self.socket), "--interval", "0.05", stdin=theirs, stdout=theirs,
                             stderr=subprocess.PIPE)
            os.close(theirs)
            shown = b""
            while shown.count(b"accelmgr  model") < 2:
                shown += os.read(ours, 65536)
            self.assertTrue(shown.startswith(b"\x1b[?1049h\x1b[?25l\x1b[H"), shown[:40])
            if ends == "interrupt":
                top.send_signal(signal.SIGINT)
            else:
                self.end(process)
            try:
                while part := os.read(ours, 65536):
                    shown += part
            except OSError:  # The other end is closed.
                pass
            os.close(ours)
            self.assertEqual(top.wait(WATCHDOG_S), DONE if ends == "interrupt" else FAILED)
            self.assertTrue(shown.endswith(b"\x1b[?25h\x1b[?1049l"), shown[-40:])
            self.assertEqual(top.stderr.read() == "", ends == "interrupt")


if __name__ == "__main__":
    serve_cli_test.PROGRAM = sys.argv.pop(1)
    unittest.main()
