"""Reads what a run leaves on the disk: its log and its checkpoints."""

import json
import pathlib


def lines_of(log: pathlib.Path, *, grows: bool = False) -> list[dict]:
    """The parsed lines of a log. Fails if the last line is torn; if the log `grows`, a torn last line is left out."""
    text = log.read_text()
    if grows:
        text = text[: text.rfind("\n") + 1]
    assert grows or text.endswith("\n"), f"the last line of {log} is torn"
    return [json.loads(line) for line in text.splitlines()]


def steps_of(log: pathlib.Path, *, grows: bool = False) -> list[dict]:
    return [line for line in lines_of(log, grows=grows) if "run" not in line]


def numbers_of(log: pathlib.Path, *, grows: bool = False) -> list[int]:
    return [line["step"] for line in steps_of(log, grows=grows)]


def losses_of(log: pathlib.Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in steps_of(log)}


def checkpoint(folder: pathlib.Path, step: int) -> pathlib.Path:
    return folder / f"step-{step:08}"


def checkpoints_in(folder: pathlib.Path) -> list[int]:
    return sorted(int(entry.name.removeprefix("step-")) for entry in folder.glob("step-*"))


def run_of(folder: pathlib.Path) -> str:
    """The id of the run that wrote a checkpoint."""
    return json.loads((folder / "state.json").read_text())["state"]["run"]["run_id"]


def tensors_of(folder: pathlib.Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in ("model.safetensors", "training.safetensors")}


def contents_of(folder: pathlib.Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
