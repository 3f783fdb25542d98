"""Writes the report of an archive's `run` (tools/archive/run), in Markdown to standard output.

usage: archive_report.py RESULTS CALL [--interrupted]

CALL is how `run` was called. RESULTS has parts.tsv, a line for each part that has ended: its name, its exit code or why
it was left out, its seconds, its title. What a part printed is in NAME.txt. gpu.json is that of tools/bench/gpu.
"""

import argparse
import dataclasses
import json
import pathlib
import re
import time

from contestants import Failure
from gpu_machine import about_machine, about_torch
from gpu_reports import gpu
from tables import as_markdown, markdown_table

DRY_RUN = "Dry run, means nothing"
NAMES_SHOWN = 10
LINES_SHOWN = 12
LINE_WIDTH = 160

# What GoogleTest and `pytest -v` print when a test has ended. Their files of results are not there after a crash.
TESTS = (
    re.compile(r"^\[ +(?P<outcome>OK|FAILED|SKIPPED) +\] (?P<name>[^\s,]+)(, where .*)? \(\d+ ms\)$", re.MULTILINE),
    re.compile(r"^(?P<name>\S+::.+?) (?P<outcome>PASSED|FAILED|SKIPPED|ERROR)( \(.*)? +\[ *\d+%\]$", re.MULTILINE),
)
COUNTS = (
    re.compile(r"^\[=+\] Running (\d+) tests?", re.MULTILINE),
    re.compile(r"^(?:collecting \.\.\. )?collected .*?(\d+)(?: items?| selected)$", re.MULTILINE),
)
OUTCOMES = {"OK": "passed", "PASSED": "passed", "SKIPPED": "skipped", "FAILED": "failed", "ERROR": "failed"}


@dataclasses.dataclass
class Part:
    name: str
    outcome: str
    seconds: str
    title: str
    printed: str = ""

    @property
    def failed(self):
        return self.outcome.isdecimal() and self.outcome != "0"

    @property
    def verdict(self):
        return "ok" if self.outcome == "0" else f"**FAILED**, exit code {self.outcome}" if self.failed else self.outcome

    def tests(self):
        """How many tests passed, failed and were skipped, and how many did not run; empty for a part without tests."""
        counts = [int(number) for pattern in COUNTS for number in pattern.findall(self.printed)]
        if not counts:
            return ""
        found = {}  # A test that passed, and then fails when it is torn down, is there twice.
        for pattern in TESTS:
            for match in pattern.finditer(self.printed):
                outcome = OUTCOMES[match["outcome"]]
                found[match["name"]] = "failed" if found.get(match["name"]) == "failed" else outcome
        numbers = {each: list(found.values()).count(each) for each in ("passed", "failed", "skipped")}
        numbers["did not run"] = counts[0] - len(found)
        told = ", ".join(f"{count} {each}" for each, count in numbers.items() if count or each == "passed")
        failed = [name for name, outcome in found.items() if outcome == "failed"]
        more = f" and {len(failed) - NAMES_SHOWN} more" if len(failed) > NAMES_SHOWN else ""
        names = f": {', '.join(f'`{name}`' for name in failed[:NAMES_SHOWN])}{more}" if failed else ""
        return f"{told} (of {counts[0]}){names}"

    def end(self):
        """The last lines that a part printed."""
        lines = [line[:LINE_WIDTH] for line in self.printed.splitlines() if line.strip()]
        return "\n".join(f"    {line}" for line in lines[-LINES_SHOWN:])


def parts_of(results):
    parts = [Part(*line.split("\t")) for line in (results / "parts.tsv").read_text().splitlines()]
    for part in parts:
        file = results / f"{part.name}.txt"
        part.printed = file.read_text(errors="replace") if file.exists() else ""
    return parts


def machine_of(benchmark):
    try:
        torch = about_torch()
    except Failure as failure:
        torch = {"why_no_torch": str(failure)}
    return {**about_machine(), **torch, **benchmark.get("machine", {})}


def machine_table(machine):
    rows = [["GPU", "none: there is no nvidia-smi"]]
    if gpus := [line.split(", ") for line in machine["nvidia_smi"].splitlines()]:
        name, driver, memory, generation, lanes, clock = gpus[0]
        rows = [
            ["GPU", f"{len(gpus)} x {name}, {memory}, PCIe {generation} x{lanes}, {clock}"],
            ["driver", f"{driver}; CUDA {machine.get('cuda_driver')}, its runtime {machine.get('cuda_runtime')}"],
        ]
    torch = f"none: {machine.get('why_no_torch')}"
    if "torch" in machine:
        nccl = ".".join(map(str, machine["nccl"] or ["-"]))
        torch = f"{machine['torch']}, CUDA {machine['torch_cuda']}, cuDNN {machine['cudnn']}, NCCL {nccl}"
    rows += [
        ["CPU", f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_bytes'] / 2**30:.0f} GiB"],
        ["Linux", machine["kernel"]],
        ["Python", machine.get("python")],
        ["torch", torch],
    ]
    return markdown_table(["machine", ""], rows)


def benchmarks(record, is_dry_run):
    report = gpu(record["lines"])
    if is_dry_run:
        report.tables = [dataclasses.replace(each, title=f"{DRY_RUN}: {each.title}") for each in report.tables]
        report.targets = [dataclasses.replace(each, text=f"{DRY_RUN}: {each.text}") for each in report.targets]
    told = [as_markdown(report)]
    if record["left_out"]:
        told.append(f"The step of the GPT is left out: {record['left_out']}")
    told += [f"{label} **FAILED**: {text.splitlines()[0][:LINE_WIDTH]}" for label, text in record["failures"].items()]
    return told


def report_of(results, call, interrupted):
    parts = parts_of(results)
    file = results / "gpu.json"
    benchmark = json.loads(file.read_text()) if file.exists() else {}
    machine = machine_of(benchmark)
    is_dry_run = "--dry-run" in call.split()
    gpu_name = machine["nvidia_smi"].partition(",")[0] or "a machine without a GPU"
    failed = [part for part in parts if part.failed]
    when = time.strftime("%F %H:%M UTC", time.gmtime())
    outcome = f"{len(failed) or 'none'} of {len(parts)} parts failed{', then it was interrupted' * interrupted}"
    paragraphs = [
        "# Dry run without a GPU: no figure below means anything" if is_dry_run else f"# accelmgr on {gpu_name}",
        f"{when}, commit {machine['commit']}, `{call}`, {sum(int(part.seconds) for part in parts)} s: {outcome}.",
        machine_table(machine),
        markdown_table(
            ["part", "outcome", "s", "tests"],
            [[part.title, part.verdict, part.seconds, part.tests()] for part in parts],
        ),
    ]
    for part in failed:
        paragraphs += [f"The end of what was printed by *{part.title}*:", part.end() or "    nothing"]
    if benchmark:
        paragraphs += ["## Benchmarks", *benchmarks(benchmark, is_dry_run)]
    return "\n\n".join(paragraphs)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", metavar="RESULTS", type=pathlib.Path)
    parser.add_argument("call", metavar="CALL")
    parser.add_argument("--interrupted", action="store_true")
    print(report_of(**vars(parser.parse_args())))
