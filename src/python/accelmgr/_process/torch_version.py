# Runs in: all processes.
"""Checks that this interpreter has a torch with which accelmgr works. The package imports it first."""

from __future__ import annotations

import re
import sys

OLDEST = (2, 4)


def check(version: object, where: object) -> tuple[int, int]:
    """The version's first two numbers. Raises ImportError if torch is older than OLDEST, or has no version."""
    text = ".".join(map(str, OLDEST))
    numbers = re.match(r"(\d+)\.(\d+)", str(version))
    if numbers is None:
        raise ImportError(
            f"accelmgr needs torch {text} or newer; what {sys.executable} imports as torch, {where}, has no version"
        )
    found = int(numbers[1]), int(numbers[2])
    if found < OLDEST:
        raise ImportError(
            f"accelmgr needs torch {text} or newer; {sys.executable} imports torch {version}, from {where}: "
            f"pip install 'torch>={text}'"
        )
    return found


try:
    import torch
except Exception as error:  # A broken installation may raise OSError: a library is missing.
    raise ImportError(
        f"accelmgr needs torch {'.'.join(map(str, OLDEST))} or newer, which {sys.executable} cannot import: "
        f"{type(error).__name__}: {error}"
    ) from error
VERSION = check(getattr(torch, "__version__", None), getattr(torch, "__file__", None) or list(torch.__path__))
