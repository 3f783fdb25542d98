# Runs in: all processes.
"""Whether code belongs to the user's script, or to a library."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import sysconfig

SCRIPT = ("__main__", "__mp_main__")
"""Modules that no other process can import: the user's script, also in a process that multiprocessing has started."""
LIBRARIES = (os.path.dirname(os.path.dirname(__file__)), *map(sysconfig.get_path, ("stdlib", "purelib", "platlib")))
_INSTALLED = frozenset({"site-packages", "dist-packages"})
"""Folders of libraries wherever they are: those of an environment inside the project, or of the distribution."""


def _folders() -> tuple[str, ...]:
    """The folder of the script, and the current one, as they are when accelmgr is imported."""
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    folders = [os.path.dirname(os.path.abspath(script))] if script else []
    with contextlib.suppress(OSError):  # The current folder was removed.
        folders.append(os.getcwd())
    return tuple(os.path.join(folder, "") for folder in folders)


_PROJECT = _folders()


def is_of_script(name: str | None) -> bool:
    """Whether a module of that name is the script's. Also true if there is none: exec() has run its code."""
    return name in SCRIPT or (name is not None and name not in sys.modules)


@functools.cache
def is_of_library(name: str | None) -> bool:
    """Whether `name` is a module of a library. A module that cannot be imported here is the script's."""
    module = sys.modules.get(name or "")
    file = getattr(module, "__file__", None) or ""
    return module is not None and name not in SCRIPT and (not file or file.startswith(LIBRARIES))


@functools.cache
def is_of_project(name: str | None) -> bool:
    """Whether `name` is a module beside the script: in its folder or in the current one, and not installed there."""
    file = getattr(sys.modules.get(name or ""), "__file__", None) or ""
    return file.startswith(_PROJECT) and not is_of_library(name) and _INSTALLED.isdisjoint(file.split(os.sep))
