"""The user's script in the processes of spawn(): each runs its top again, as torch.multiprocessing does.

So a seed, a setting or a constant at the top is the same in all ranks, and functions and classes of the script are
found by their names. A script without `if __name__ == "__main__":` would start processes again; its function travels by
value.
"""

from __future__ import annotations

import ast
import io
import multiprocessing.spawn
import os
import pickle
import sys
from types import FunctionType
from typing import Any

import cloudpickle

SHARED = "accelmgr.compat.xla_multiprocessing"
"""Wrappers of this module at the top of a script stand for one object of all ranks, so they travel."""
Main = tuple[str, str]
"""Name of the module (python -m), or path of the script; the other is empty. Both empty: no script that can run."""


def _is_guarded(path: str) -> bool:
    try:
        with open(path, "rb") as file:
            body = ast.parse(file.read()).body
    except (OSError, SyntaxError, ValueError):
        return False
    tests = [statement.test for statement in body if isinstance(statement, ast.If)]
    return any(isinstance(node, ast.Name) and node.id == "__name__" for test in tests for node in ast.walk(test))


def own_main() -> Main:
    """The script of this process."""
    main = sys.modules.get("__main__")
    path = getattr(main, "__file__", None)
    if main is None or path is None or not _is_guarded(path):
        return "", ""
    if any(type(value).__module__ == SHARED for value in vars(main).values()):
        return "", ""
    name = getattr(getattr(main, "__spec__", None), "name", None)
    return (name, "") if name is not None else ("", os.path.abspath(path))


def run_top(main: Main) -> None:
    """Makes the script the module `__main__` of this process, without what is behind its guard."""
    name, path = main
    if name:
        multiprocessing.spawn._fixup_main_from_name(name)  # type: ignore[attr-defined]
    elif path:
        multiprocessing.spawn._fixup_main_from_path(path)  # type: ignore[attr-defined]


def _found(name: str) -> Any:
    found: Any = sys.modules["__main__"]
    for part in name.split("."):
        found = getattr(found, part)
    return found


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """Refers to what the script defines by its name."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, (type, FunctionType)) and obj.__module__ in ("__main__", "__mp_main__"):
            found: Any = sys.modules.get("__main__")
            for name in obj.__qualname__.split("."):
                found = getattr(found, name, None)
            if found is obj:
                return _found, (obj.__qualname__,)
        return super().reducer_override(obj)


def dumps(value: Any, main: Main) -> bytes:
    """For processes that have run the top of `main`."""
    if main == ("", ""):
        return cloudpickle.dumps(value)  # type: ignore[no-any-return]
    file = io.BytesIO()
    _Pickler(file, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return file.getvalue()
