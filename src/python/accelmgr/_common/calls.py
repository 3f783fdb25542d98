# Runs in: the host, which asks, and runners, which answer.
"""Calls of the host's functions in a runner: the function and its result lie in a memfd of the host."""

from __future__ import annotations

import io
import marshal
import os
import pickle
import sys
import traceback
import types
from collections.abc import Callable
from typing import Any

import cloudpickle

from accelmgr._common.memfd import HostFile, open_memfd
from accelmgr._common.pickling import dump
from accelmgr.errors import ModelError, UsageError

NAME = "accelmgr-call"


def _function(code: bytes, module: str, name: str, defaults: Any, keywords: Any, values: list[Any]) -> Any:
    """It sees the globals of this process."""
    cells = tuple(types.CellType(value) for value in values)
    function = types.FunctionType(marshal.loads(code), vars(sys.modules[module]), name, defaults, cells)
    function.__kwdefaults__ = keywords
    return function


class _Pickler(pickle.Pickler):
    """For a fork, which has all modules. A function that is not found by its name travels as its code."""

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, types.FunctionType) or getattr(sys.modules[obj.__module__], obj.__name__, None) is obj:
            return NotImplemented
        values = [cell.cell_contents for cell in obj.__closure__ or ()]
        code = marshal.dumps(obj.__code__)
        return _function, (code, obj.__module__, obj.__name__, obj.__defaults__, obj.__kwdefaults__, values)


class Calls(HostFile):
    """The side of the host."""

    def __init__(self) -> None:
        super().__init__(NAME)

    def put(self, function: Callable[..., Any], forked: bool) -> None:
        """forked: runners are forks of this process."""
        file = io.BytesIO()
        try:
            (_Pickler if forked else cloudpickle.Pickler)(file).dump(function)
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            raise UsageError(f"call(): {function!r} cannot be sent to a runner: {what}") from error
        _write(self._fd, file.getvalue())

    def result(self) -> Any:
        """Raises ModelError with the traceback of what the function has raised."""
        value, error = pickle.loads(_read(self._fd))
        _write(self._fd, b"")
        if error:
            raise ModelError(f"call(): {error}")
        return value


def answer(address: str, model: Any) -> None:
    """The side of a runner."""
    pid, fd = address.split(":")
    file = open_memfd(pid, fd, NAME, os.O_RDWR)
    try:
        try:
            given = dump((pickle.loads(_read(file))(model), ""))
        except Exception:
            given = dump((None, traceback.format_exc()))
        _write(file, given)
    finally:
        os.close(file)


def _read(fd: int) -> bytes:
    with open(fd, "rb", closefd=False) as file:
        file.seek(0)
        return file.read()


def _write(fd: int, content: bytes) -> None:
    os.ftruncate(fd, 0)
    with open(fd, "wb", closefd=False) as file:
        file.seek(0)
        file.write(content)
