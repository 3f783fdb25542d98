"""Checks what the report of an archive's `run` says of parts that succeed, fail, crash, are cut short or left out."""

import json
import os
import pathlib
import sys
import tempfile
import unittest

BENCH = pathlib.Path(__file__).resolve().parents[2] / "tools/bench"
sys.path.insert(0, str(BENCH))
os.environ["ACCELMGR_PYTHON"] = sys.executable

import archive_report  # noqa: E402

MIB = 2**20
FULL = {"case": "gradients", "metric": "bandwidth", "bytes": 475 * MIB, "bucket_bytes": 25 * MIB, "unit": "GB/s"}
BENCHMARK = {
    "lines": [{**FULL, "name": "registered", "value": 54.75}, {**FULL, "name": "unregistered", "value": 12.5}],
    "left_out": None,
    "failures": {},
    "machine": {
        "nvidia_smi": "NVIDIA H100 80GB HBM3, 580.159.04, 81559 MiB, 5, 16, 1980 MHz",
        "torch": "2.11.0+cu130",
        "torch_cuda": "13.0",
        "cudnn": 91900,
        "nccl": [2, 28, 9],
        "cuda_driver": 13000,
        "cuda_runtime": 13000,
        "commit": "20ec41b",
    },
}
GTEST = """[==========] Running 3 tests from 1 test suite.
[ RUN      ] Transport.Copies/Gpu
[       OK ] Transport.Copies/Gpu (173 ms)
[ RUN      ] Transport.Registers/Gpu
transport_test.cpp:17: Failure
[  FAILED  ] Transport.Registers/Gpu, where GetParam() = 8-byte object <00> (17 ms)
[ RUN      ] Transport.Shares/Gpu
[  SKIPPED ] Transport.Shares/Gpu (0 ms)
[==========] 3 tests from 1 test suite ran. (1771 ms total)
[  PASSED  ] 1 test.
[  SKIPPED ] 1 test, listed below:
[  SKIPPED ] Transport.Shares/Gpu
[  FAILED  ] 1 test, listed below:
[  FAILED  ] Transport.Registers/Gpu, where GetParam() = 8-byte object <00>
"""
PYTEST = """============================= test session starts ==============================
collecting ... collected 78 items / 67 deselected / 11 selected

test_cuda_graphs.py::test_refused[draws from NumPy] PASSED [  9%]
test_cuda_graphs.py::test_replayed[{5: 'die'}] FAILED        [ 18%]
test_cuda_graphs.py::test_in_a_team SKIPPED (it asks the f...) [ 27%]
test_cuda_layers.py::test_layers[ties-False-2] PASSED       [ 36%]
test_cuda_layers.py::test_layers[ties-False-2] ERROR        [ 36%]
test_cuda_layers.py::test_others NOT RUN (not run: the limit is over)    [ 45%]
"""


class ArchiveReport(unittest.TestCase):
    def report(self, parts, benchmark=None, call="./run --quick", interrupted=False):
        """The report of parts [(outcome, what was printed)]."""
        with tempfile.TemporaryDirectory() as folder:
            results = pathlib.Path(folder)
            for number, (_, printed) in enumerate(parts):
                (results / f"part{number}.txt").write_text(printed)
            lines = [f"part{number}\t{outcome}\t7\tpart {number}\n" for number, (outcome, _) in enumerate(parts)]
            (results / "parts.tsv").write_text("".join(lines))
            if benchmark:
                (results / "gpu.json").write_text(json.dumps(benchmark))
            return archive_report.report_of(results, call, interrupted)

    def assert_has(self, report, *texts):
        for text in texts:
            self.assertIn(text, report)

    def test_it_names_machine_commit_call_and_time(self):
        report = self.report([(0, ""), (0, "")], BENCHMARK)
        self.assertEqual(report.splitlines()[0], "# accelmgr on NVIDIA H100 80GB HBM3")
        self.assert_has(
            report,
            "commit 20ec41b, `./run --quick`, 14 s: none of 2 parts failed.",
            "| GPU | 1 x NVIDIA H100 80GB HBM3, 81559 MiB, PCIe 5 x16, 1980 MHz |",
            "| driver | 580.159.04; CUDA 13000, its runtime 13000 |",
            "| torch | 2.11.0+cu130, CUDA 13.0, cuDNN 91900, NCCL 2.28.9 |",
            "| part 1 | ok | 7 |  |",
        )

    def test_it_has_tables_and_targets_that_were_reached_missed_and_not_measured(self):
        self.assert_has(
            self.report([(0, "")], BENCHMARK),
            "| size | reg. 25 MiB | not 25 MiB | transport |\n| --- | --- |",
            "| 475 MiB of gradients in buckets of 25 MiB, registered, GB/s | 54.8 | at least 52.0 | reached |",
            "| 475 MiB of gradients, not registered, GB/s | 12.5 | at least 16.0 | missed |",
            "| 475 MiB of parameters, GB/s | - | at least 50.0 | not measured |",
        )

    def test_a_dry_run_is_marked_everywhere(self):
        report = self.report([(0, "")], BENCHMARK, "./run --dry-run")
        self.assertEqual(report.splitlines()[0], "# Dry run without a GPU: no figure below means anything")
        self.assert_has(
            report, "Dry run, means nothing: Gradients from", "| Dry run, means nothing: 475 MiB of parameters"
        )

    def test_tests_are_counted_and_those_that_failed_named(self):
        self.assert_has(
            self.report([(1, GTEST), (1, PYTEST)]),
            "2 of 2 parts failed",
            "**FAILED**, exit code 1 | 7 | 1 passed, 1 failed, 1 skipped (of 3): `Transport.Registers/Gpu` |",
            "1 passed, 2 failed, 1 skipped, 7 did not run (of 11): `test_cuda_graphs.py::test_replayed[{5: 'die'}]`, "
            "`test_cuda_layers.py::test_layers[ties-False-2]` |",
        )

    def test_a_crash_shows_its_last_words_and_leaves_the_rest(self):
        crash = (
            GTEST[: GTEST.index("transport_test")]
            + "\n".join(f"line {n}" for n in range(99))
            + "\nSegmentation fault\n"
        )
        report = self.report(
            [(0, PYTEST.replace("FAILED", "PASSED").replace("ERROR", "PASSED")), (139, crash)], BENCHMARK
        )
        self.assert_has(report, "| part 1 | **FAILED**, exit code 139 | 7 | 1 passed, 2 did not run (of 3) |")
        self.assert_has(report, "*part 1*:\n\n    line 88\n", "    Segmentation fault\n\n## Benchmarks", "| 475 MiB |")
        self.assertNotIn("line 87", report)
        self.assert_has(report, "3 passed, 1 skipped, 7 did not run (of 11) |")

    def test_what_was_left_out_is_no_failure(self):
        report = self.report([("left out: python3 has no pytest", "")])
        self.assert_has(report, "none of 1 parts failed", "| part 0 | left out: python3 has no pytest | 7 |  |")

    def test_what_of_the_benchmarks_failed_or_was_left_out_is_told(self):
        failed = {"left_out": "torch sees no GPU", "failures": {"ddp": "ddp failed with exit code 1\nTraceback"}}
        report = self.report([(1, "")], BENCHMARK | failed)
        self.assert_has(report, "The step of the GPT is left out: torch sees no GPU", "ddp **FAILED**: ddp failed with")
        self.assertNotIn("Traceback", report)

    def test_an_interruption_is_told(self):
        self.assert_has(self.report([(0, "")], interrupted=True), "none of 1 parts failed, then it was interrupted.")
        self.assert_has(self.report([], interrupted=True), "none of 0 parts failed, then it was interrupted.")


if __name__ == "__main__":
    unittest.main()
