# Runs in: all processes.
"""Whether code belongs to the user's script, or to a library."""

from __future__ import annotations

import functools
import os
import sys
import sysconfig

SCRIPT = ("__main__", "__mp_main__")
"""Modules that no other process can import: the user's script, also in a process that multiprocessing has started."""
LIBRARIES = (os.path.dirname(os.path.dirname(__file__)), *map(sysconfig.get_path, ("stdlib", "purelib", "platlib")))
_INSTALLED = frozenset({"site-packages", "dist-packages"})
"""Folders of libraries wherever they are: those of an environment inside the project, or of the distribution."""


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
    """Whether `name` is a module of the project that the script is part of: it was not installed as libraries are."""
    file = getattr(sys.modules.get(name or ""), "__file__", None) or ""
    is_library = is_of_library(name) or not _INSTALLED.isdisjoint(file.split(os.sep))
    return bool(file) and not is_library and (name or "").partition(".")[0] != "torch"  # Torch's own tree.
