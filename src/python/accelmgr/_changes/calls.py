# Runs in: the host, which asks, and runners, which answer.
"""Calls of the host's functions in a runner.

Each call has a memfd of its own for function and result. Another memfd names the present one: a runner may still answer
an interrupted call when the host has made the next.
"""

from __future__ import annotations

import io
import marshal
import os
import pickle
import struct
import sys
import traceback
import types
from collections.abc import Callable
from typing import Any

import cloudpickle

from accelmgr._memory.memfd import HostFile, open_memfd
from accelmgr._serialization.origin import SCRIPT
from accelmgr._serialization.pickling import CannotPickle, attempted, dump
from accelmgr.errors import ModelError, UsageError

NAME = "accelmgr-call"
NUMBER = struct.Struct("<Q")
"""The number of a call, with which its memfd begins."""

_answered = 0
"""The call that this runner has answered last."""


def _function(code: bytes, module: str, name: str, defaults: Any, keywords: Any, values: list[Any]) -> Any:
    """Makes a function that sees the globals of this process."""
    cells = tuple(types.CellType(value) for value in values)
    function = types.FunctionType(marshal.loads(code), vars(sys.modules[module]), name, defaults, cells)
    function.__kwdefaults__ = keywords
    return function


class _Pickler(pickle.Pickler):
    """For a fork, which has all modules. A function travels as its code if its name does not find it, or if it is the
    script's, which may have defined it after the fork."""

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, types.FunctionType):
            return NotImplemented
        if obj.__module__ not in SCRIPT and getattr(sys.modules[obj.__module__], obj.__name__, None) is obj:
            return NotImplemented
        values = [cell.cell_contents for cell in obj.__closure__ or ()]
        code = marshal.dumps(obj.__code__)
        return _function, (code, obj.__module__, obj.__name__, obj.__defaults__, obj.__kwdefaults__, values)


class Calls(HostFile):
    """The side of the host."""

    def __init__(self) -> None:
        super().__init__(NAME)
        self._number = 0
        self._present: HostFile | None = None

    def put(self, function: Callable[..., Any], forked: bool) -> None:
        """forked: runners are forks of this process."""
        kind = _Pickler if forked else cloudpickle.Pickler

        def dump() -> bytes:
            file = io.BytesIO()
            file.write(NUMBER.pack(self._number + 1))
            kind(file).dump(function)
            return file.getvalue()

        try:
            asked = attempted(dump)
        except CannotPickle as error:
            raise UsageError(f"call(): {function!r} cannot be sent to a runner: {error}") from error
        self._leave()
        self._number += 1
        self._present = HostFile(NAME)
        _write(self._present.fd, asked)
        os.pwrite(self.fd, NUMBER.pack(self._present.fd), 0)

    def result(self) -> Any:
        """Raises ModelError with the traceback of what the function has raised."""
        assert self._present is not None
        value, error = pickle.loads(_read(self._present.fd)[NUMBER.size :])
        self._leave()
        if error:
            raise ModelError(f"call(): {error}")
        return value

    def _leave(self) -> None:
        if self._present is not None:
            self._present.close()

    def close(self) -> None:
        self._leave()
        super().close()


def answer(address: str, model: Any) -> None:
    """The side of a runner. It makes no call twice, and none that the host has left."""
    global _answered
    pid, fd = address.split(":")
    pointer = open_memfd(pid, fd, NAME)
    try:
        (present,) = NUMBER.unpack(os.pread(pointer, NUMBER.size, 0))
    finally:
        os.close(pointer)
    try:
        file = open_memfd(pid, present, NAME, os.O_RDWR)
    except FileNotFoundError:
        return
    try:
        asked = _read(file)
        (number,) = NUMBER.unpack(asked[: NUMBER.size])
        if number == _answered:
            return
        _answered = number
        try:
            given = dump((pickle.loads(asked[NUMBER.size :])(model), ""))
        except Exception:
            given = dump((None, traceback.format_exc()))
        _write(file, asked[: NUMBER.size] + given)
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
