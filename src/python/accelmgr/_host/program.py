# Runs in: the host.
"""The C++ program `accelmgr`, which computes built-in models with a libtorch of its own."""

from __future__ import annotations

import os
import pathlib

from accelmgr.errors import ConfigError, ModelError


def _is_program(path: pathlib.Path) -> bool:
    """True for an ELF executable. The package installs a script of the same name, which is none."""
    try:
        with open(path, "rb") as file:
            return file.read(4) == b"\x7fELF" and os.access(path, os.X_OK)
    except OSError:
        return False


def find(model: str) -> str:
    """The path of the program: in the build of this package, or in PATH. Raises ModelError that names `model`."""
    built = pathlib.Path(__file__).parents[3] / "tools" / "accelmgr"
    for path in (built, *(pathlib.Path(folder) / "accelmgr" for folder in os.get_exec_path())):
        if _is_program(path):
            return str(path)
    raise ModelError(
        f"model '{model}' is computed by libtorch in the program accelmgr, which the Python package does not bring, "
        f"and there is none at {built} or in PATH. Build it in a checkout of accelmgr (tools/run) and put the folder "
        "of build/release/tools/accelmgr in PATH; or pass a torch.nn.Module"
    )


def command_for(model: str, data: str) -> list[str]:
    """The command of the program, if it computes `model.kind`. Empty: this interpreter does."""
    if model == "python":
        return []
    if data == "python":
        raise ConfigError(
            f"model.kind is '{model}', which the program accelmgr computes; it reads no dataset of Python: pass "
            "the name of a built-in dataset, or a torch.nn.Module",
            "model.kind",
        )
    return [find(model)]
