"""A picture of a training run: loss, throughput, and where the time went, from the file of `accelmgr train --log`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import pathlib
import sys
from typing import Any

from accelmgr.errors import DataError, Error, UsageError

PHASES = {  # Keys of a record, in the order of a step. The colours differ in lightness too.
    "compute_ms": ("forward and backward", "#1f5a94"),
    "reduce_ms": ("reduction", "#e08214"),
    "wait_ms": ("waiting", "#b2b2b2"),
    "update_ms": ("optimizer", "#4d9a4d"),
}
NEEDED = ("step", "samples", "step_ms")
BINS = 120  # The most columns of the time chart and points of the throughput chart; longer runs are averaged.


@dataclasses.dataclass
class Log:
    """The steps that counted, oldest first, and the record of the run in the last line, empty while the run goes on.

    A step has `step`, `loss` (None when it was not finite), `samples`, `step_ms`, the keys of PHASES, and, if they were
    measured, `held_out_loss` and `scalars`.
    """

    steps: list[dict[str, Any]]
    run: dict[str, Any]


def read_log(path: str | os.PathLike[str]) -> Log:
    """Reads a log, also while it is being written: it ignores an unfinished last line. Raises DataError, OSError.

    Source: the lines that tools/accelmgr/run_log.cpp writes, one JSON object each.
    """
    lines = pathlib.Path(path).read_text(encoding="utf-8").split("\n")
    steps: dict[int, dict[str, Any]] = {}
    run: dict[str, Any] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            if not isinstance(record, dict):
                raise ValueError("it is not a JSON object")
        except ValueError as error:
            if number == len(lines):
                break
            raise DataError(f"{os.fspath(path)}:{number} is not a record of a training run: {error}") from None
        if "run" in record:
            run = record["run"]
        elif record.get("counted") and all(isinstance(record.get(key), (int, float)) for key in NEEDED):
            steps[record["step"]] = record
    if not steps:
        raise DataError(f"{os.fspath(path)} has no step that counted; was it written by `accelmgr train --log FILE`?")
    return Log([steps[step] for step in sorted(steps)], run)


@dataclasses.dataclass
class _Bin:
    """Consecutive steps."""

    first: int
    last: int
    ms: float = 0.0
    samples: int = 0
    phases: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def middle(self) -> float:
        return (self.first + self.last) / 2


def _bins(steps: list[dict[str, Any]]) -> list[_Bin]:
    size = math.ceil(len(steps) / BINS)
    bins = []
    for begin in range(0, len(steps), size):
        own = steps[begin : begin + size]
        one = _Bin(own[0]["step"], own[-1]["step"])
        for record in own:
            one.ms += record["step_ms"] + record.get("update_ms", 0.0)
            one.samples += record["samples"]
            for phase in PHASES:
                one.phases[phase] = one.phases.get(phase, 0.0) + record.get(phase, 0.0)
        bins.append(one)
    return bins


def _smooth(values: list[float], span: int) -> list[float]:
    """Mean of the `span` values around each one."""
    half = span // 2
    windows = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
    return [sum(window) / len(window) for window in windows]


def plot(log: Log, file: str | os.PathLike[str], title: str = "") -> None:
    """Writes the picture in the format that the suffix of `file` names (PNG, SVG, ...).

    Raises UsageError if matplotlib is not installed, and OSError.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError:
        raise UsageError("plotting needs matplotlib: pip install 'accelmgr[plot]'") from None
    figure = Figure(figsize=(9, 9), layout="constrained")  # Not pyplot, which has global state.
    FigureCanvasAgg(figure)
    top, middle, bottom = figure.subplots(3, 1, sharex=True, height_ratios=[3, 2, 2])
    if title:
        figure.suptitle(title)
    _plot_loss(top, log)
    bins = _bins(log.steps)
    _plot_throughput(middle, bins)
    _plot_phases(bottom, bins)
    bottom.set_xlabel("step")
    bottom.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    figure.align_ylabels()
    figure.savefig(file, dpi=120)


def _plot_loss(axes: Any, log: Log) -> None:
    finite = [record for record in log.steps if isinstance(record.get("loss"), (int, float))]
    steps, losses = [record["step"] for record in finite], [float(record["loss"]) for record in finite]
    span = max(1, len(losses) // 30)
    if span > 1:
        axes.plot(steps, losses, color="#1f5a94", alpha=0.3, linewidth=0.8, label="loss")
        label = f"mean of {span // 2 * 2 + 1} steps"
        axes.plot(steps, _smooth(losses, span), color="#1f5a94", linewidth=1.8, label=label)
    else:
        axes.plot(steps, losses, color="#1f5a94", linewidth=1.5, marker=".", label="loss")
    held_out = [(r["step"], r["held_out_loss"]) for r in log.steps if isinstance(r.get("held_out_loss"), (int, float))]
    if held_out:
        axes.plot(*zip(*held_out, strict=True), color="#c0392b", marker="o", linewidth=1.5, label="held-out loss")
    is_text = '"data.kind": "text"' in str(log.run.get("configuration", "")).replace("'", '"')
    axes.set_ylabel("loss, nats/byte" if is_text else "loss")
    axes.grid(alpha=0.3)
    axes.legend(loc="upper right")


def _plot_throughput(axes: Any, bins: list[_Bin]) -> None:
    rates = [one.samples / one.ms * 1e3 for one in bins if one.ms > 0]
    axes.plot([one.middle for one in bins if one.ms > 0], rates, color="#1f5a94", linewidth=1.5)
    axes.set_ylabel("throughput, samples/s")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)


def _plot_phases(axes: Any, bins: list[_Bin]) -> None:
    edges = [one.first - 0.5 for one in bins] + [bins[-1].last + 0.5]
    floor = [0.0] * len(bins)
    for phase, (label, colour) in PHASES.items():
        totals = [sum(one.phases.values()) or 1.0 for one in bins]
        shares = [100 * one.phases[phase] / total for one, total in zip(bins, totals, strict=True)]
        ceiling = [low + share for low, share in zip(floor, shares, strict=True)]
        axes.stairs(ceiling, edges, baseline=floor, fill=True, color=colour, label=label)
        floor = ceiling
    axes.set_ylabel("share of time, %")
    axes.set_ylim(0, 100)
    axes.set_xlim(edges[0], edges[-1])
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, 1.2), ncols=len(PHASES), frameon=False)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = __doc__
    parser.add_argument("log", metavar="LOG", type=pathlib.Path, help="the file that `accelmgr train --log` wrote")
    parser.add_argument(
        "-o", "--output", type=pathlib.Path, metavar="FILE", help="PNG or SVG; default: LOG's name with .png"
    )


def run(arguments: argparse.Namespace) -> int:
    """Runs `accelmgr plot`. Returns its exit code: 0, or 1 after it wrote the error to standard error."""
    output = arguments.output or arguments.log.with_suffix(".png")
    try:
        if output.suffix.lower() not in (".png", ".svg"):
            raise DataError(f"--output {output}: the file's name must end with .png or .svg")
        plot(read_log(arguments.log), output, arguments.log.name)
    except Exception as error:
        if not isinstance(error, (Error, OSError, UnicodeDecodeError)):
            raise
        print(f"accelmgr plot: {error}", file=sys.stderr)
        return 1
    try:
        print(output, flush=True)
    except OSError as error:
        print(f"accelmgr plot: standard output could not be written: {error.strerror}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Else the interpreter would try to flush again.
        return 1
    return 0
