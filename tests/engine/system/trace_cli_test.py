"""Tests of `accelmgr trace`: trace_cli_test.py PROGRAM [unittest arguments].

Perfetto's own trace processor reads the files, where it is installed.
"""
import collections
import json
import signal
import subprocess
import sys
import time
import unittest

import serve_cli_test
import trace_processor
from serve_cli_test import DONE, FAILED, USAGE, WATCHDOG_S, ServiceTest

INTERRUPTED = 130


class Trace(ServiceTest):
    def setUp(self):
        super().setUp()
        self.file = self.folder / "trace.json"

    def trace(self, *arguments):
        return self.ask("trace", "-o", str(self.file), *arguments)

    def tracing(self, seconds):
        """Begins a trace, and returns when it looks at the service."""
        process = self.start("trace", "--socket", str(self.socket), "-o", str(self.file), "--seconds", str(seconds),
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        deadline = time.monotonic() + WATCHDOG_S
        while not self.file.exists():
            self.assertIsNone(process.poll(), "the trace has ended")
            self.assertLess(time.monotonic(), deadline)
        return process

    def events(self):
        """The complete events of the file, which Perfetto must read as they are."""
        text = self.file.read_bytes()
        trace = json.loads(text)
        events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
        if trace_processor.engine():
            self.expect_perfetto_reads(text, trace, events)
        return events

    def expect_perfetto_reads(self, text, trace, events):
        with trace_processor.TraceProcessor(text) as processor:
            wrong = processor.query("select name, value from stats where value != 0 and severity != 'info'")
            self.assertEqual(wrong, [])
            slices = processor.query(
                "select p.pid, t.tid, s.name, s.ts, s.dur, u.ts as outer, u.dur as outer_dur,"
                " extract_arg(s.arg_set_id, 'args.step') as step, extract_arg(s.arg_set_id, 'args.rank') as rank"
                " from slice s join thread_track on s.track_id = thread_track.id join thread t using (utid)"
                " join process p using (upid) left join slice u on s.parent_id = u.id")
            names = {(row["pid"], row["name"]) for row in processor.query(
                "select pid, name from process where name is not null")}
        self.assertEqual(
            sorted((s["pid"], s["tid"], s["name"], s["ts"], s["dur"], s["step"], s["rank"] or 0) for s in slices),
            sorted((e["pid"], e["tid"], e["name"], round(e["ts"] * 1000), round(e["dur"] * 1000),
                    e["args"].get("step"), e["args"].get("rank", 0)) for e in events))
        for s in slices:
            if s["outer"] is not None:
                self.assertLessEqual(s["outer"], s["ts"])
                self.assertLessEqual(s["ts"] + s["dur"], s["outer"] + s["outer_dur"])
        self.assertEqual(names, {(e["pid"], e["args"]["name"]) for e in trace["traceEvents"]
                                 if e["name"] == "process_name"})

    def names_of_processes(self):
        return {event["pid"]: event["args"]["name"] for event in json.loads(self.file.read_bytes())["traceEvents"]
                if event["name"] == "process_name"}

    @staticmethod
    def ranks_by_step(events, name):
        found = collections.defaultdict(list)
        for event in events:
            if event["name"] == name:
                found[event["args"]["step"]].append(event["args"].get("rank"))
        return {step: sorted(ranks) for step, ranks in found.items()}

    def test_what_a_service_has_done_is_a_file_for_perfetto(self):
        process = self.serve()
        self.assertEqual(self.ask("step", "--count", "20").returncode, DONE)
        done = self.trace()
        self.assertEqual((done.returncode, done.stderr), (DONE, ""))
        events = self.events()
        self.assertEqual(
            done.stdout, f"{self.file}: {len(events)} spans of 3 processes; https://ui.perfetto.dev opens it\n")
        self.assertEqual(sorted(self.names_of_processes().values()), ["manager", "runner 0", "runner 1"])
        for name in ("prepare", "data", "forward", "backward", "vote"):
            self.assertEqual(self.ranks_by_step(events, name), {step: [0, 1] for step in range(1, 21)}, name)
        self.assertEqual(len(self.ranks_by_step(events, "attempt")), 20)
        self.end(process)

    def test_it_looks_for_so_many_seconds(self):
        process = self.serve()
        self.assertEqual(self.ask("step").returncode, DONE)
        begin = time.monotonic()
        self.assertEqual(self.trace("--seconds", "0.3").returncode, DONE)
        self.assertGreater(time.monotonic() - begin, 0.3)
        self.assertEqual(self.ranks_by_step(self.events(), "forward"), {})  # That was before.
        self.end(process)

    def test_ctrl_c_writes_what_there_is(self):
        process = self.serve()
        tracing = self.tracing(1000)
        self.assertEqual(self.ask("step").returncode, DONE)
        tracing.send_signal(signal.SIGINT)
        self.assertEqual((tracing.wait(WATCHDOG_S), tracing.stderr.read()), (INTERRUPTED, ""))
        self.assertEqual(self.ranks_by_step(self.events(), "forward"), {1: [0, 1]})
        self.end(process)

    def test_the_end_of_the_service_leaves_what_came_before(self):
        process = self.serve()
        tracing = self.tracing(1000)
        self.assertEqual(self.ask("step").returncode, DONE)
        self.end(process)
        self.assertEqual(tracing.wait(WATCHDOG_S), FAILED)
        self.assertIn("the trace ends early: ", tracing.stderr.read())
        self.assertEqual(self.ranks_by_step(self.events(), "forward"), {1: [0, 1]})

    def test_what_is_wrong_is_said(self):
        self.assertIn("no service can be reached at", self.trace().stderr)
        self.assertFalse(self.file.exists())
        for wrong in (["--seconds", "x"], ["--seconds", "-1"], ["extra"]):
            self.assertEqual(self.trace(*wrong).returncode, USAGE, wrong)
        process = self.serve()
        self.file = self.folder / "absent" / "trace.json"
        refused = self.trace("--seconds", "1000")
        self.assertEqual(refused.returncode, FAILED)
        self.assertIn(f"writing {self.file}: No such file or directory", refused.stderr)
        self.end(process)


if __name__ == "__main__":
    serve_cli_test.PROGRAM = sys.argv.pop(1)
    unittest.main()
