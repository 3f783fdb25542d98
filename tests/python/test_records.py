"""Tests of what a training run reports: progress bars, plots of its log, TensorBoard."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
import warnings
from collections.abc import Iterator

import pytest
import torch
from services import PROGRAM

import accelmgr


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        loss = self.body(x).square().mean()
        return {"loss": loss, "root": loss.sqrt()}


class Elements:
    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        generator = torch.Generator().manual_seed(0)
        while True:
            yield {"x": torch.randn(4, generator=generator)}


@pytest.fixture(scope="module")
def manager() -> Iterator[accelmgr.Manager]:
    with accelmgr.Manager(
        Net(), Elements(), nprocs=1, batch_size_per_device=2, step_timeout=60, runners__threads=1
    ) as started:
        yield started


def test_tensorboard_has_the_loss_and_named_metrics(manager: accelmgr.Manager, tmp_path: pathlib.Path) -> None:
    pytest.importorskip("tensorboard", reason="the optional extra accelmgr[tensorboard] is not installed")
    from accelmgr.tensorboard import Writer

    with Writer(tmp_path / "run") as writer:
        results = list(manager.steps(3))
        for result in results:
            writer.add(result, learning_rate=0.25)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tensorboard's own imports warn.
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(tmp_path / "run"))
        events.Reload()
    assert {"throughput", "time/compute_ms"} <= set(events.Tags()["scalars"])
    for tag, values in {
        "loss": [result.loss for result in results],
        "metrics/root": [result.scalars["root"] for result in results],
        "metrics/learning_rate": [0.25] * 3,
    }.items():
        assert [event.step for event in events.Scalars(tag)] == [result.step for result in results]
        assert [event.value for event in events.Scalars(tag)] == pytest.approx(values, rel=1e-6)


def plot(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Runs `accelmgr plot`, or `python -m accelmgr plot` if the program is not built. The program calls the package."""
    command = [PROGRAM] if PROGRAM.exists() else [sys.executable, "-m", "accelmgr"]
    return subprocess.run([*map(str, [*command, "plot", *arguments])], capture_output=True, text=True, timeout=100)


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The log of a run of the program."""
    pytest.importorskip("matplotlib", reason="the optional extra accelmgr[plot] is not installed")
    if not PROGRAM.exists():
        pytest.skip("there is no `accelmgr` beside the package: it is installed, not built")
    folder = tmp_path_factory.mktemp("log")
    file, config = folder / "run.jsonl", folder / "config.yaml"
    config.write_text("nprocs: 1\nrunners: {threads: 1}\n")
    command = [PROGRAM, "train", "--config", config, "--steps", "150", "--log", file]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return file


def test_plot_of_a_run_has_loss_throughput_and_phases(log: pathlib.Path, tmp_path: pathlib.Path) -> None:
    done = plot(log, "-o", tmp_path / "run.svg")
    assert (done.returncode, done.stderr) == (0, "")
    picture = (tmp_path / "run.svg").read_text()
    texts = ["loss", "mean of 5 steps", "throughput, samples/s", "share of time, %", "step", "waiting", "optimizer"]
    assert [text for text in texts if f"<!-- {text} -->" not in picture] == []


def test_log_that_is_still_written_is_read_up_to_its_last_line(log: pathlib.Path, tmp_path: pathlib.Path) -> None:
    from accelmgr.plot import read_log

    lines = log.read_text().splitlines()
    growing = tmp_path / "growing.jsonl"
    growing.write_text("\n".join(lines[:5]) + '\n{"step": 6, "att')
    assert [record["step"] for record in read_log(growing).steps] == [1, 2, 3, 4, 5]
    assert read_log(growing).run == {} != read_log(log).run


def test_steps_without_a_finite_loss_leave_a_gap(log: pathlib.Path, tmp_path: pathlib.Path) -> None:
    from accelmgr.plot import read_log

    records = [json.loads(line) for line in log.read_text().splitlines()[:6]]
    records[2]["loss"] = None  # The log writes a loss that is not finite as null.
    records[3]["counted"] = False
    file = tmp_path / "gap.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert [record["step"] for record in read_log(file).steps] == [1, 2, 3, 5, 6]
    done = plot(file)  # In a process of its own: matplotlib keeps the files of its fonts open.
    assert (done.returncode, done.stdout.strip()) == (0, str(tmp_path / "gap.png")), done.stderr
    assert (tmp_path / "gap.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("content", "output", "complaint"),
    [
        ("", "x.png", "no step that counted"),
        ('{"step": 1}\nnonsense\n{}\n', "x.png", "bad.jsonl:2 is not a record"),
        ("[1]\n[2]\n", "x.png", "bad.jsonl:1 is not a record"),
        ("{}\n", "x.gif", "must end with .png or .svg"),
        (None, "x.png", "No such file"),
    ],
    ids=["empty", "no JSON", "no object", "suffix", "no file"],
)
def test_plot_says_what_is_wrong(
    content: str | None, output: str, complaint: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import argparse

    from accelmgr.plot import run

    file = tmp_path / "bad.jsonl"
    if content is not None:
        file.write_text(content)
    assert run(argparse.Namespace(log=file, output=tmp_path / output)) == 1
    assert complaint in capsys.readouterr().err
    assert not (tmp_path / output).exists()
