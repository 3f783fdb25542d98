"""Raises in Python code of this thread where the interpreter may call a signal handler, at one place after another."""

from __future__ import annotations

import dis
import os
import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

HERE = os.path.dirname(__file__)
# The interpreter looks for signals when it has done one of these.
LOOKS = ("CALL", "JUMP_BACKWARD", "JUMP_ABSOLUTE", "RESUME")


class Interrupted(KeyboardInterrupt):
    pass


_looks: dict[CodeType, set[int]] = {}


def _looks_of(code: CodeType) -> set[int]:
    """The offsets of such instructions."""
    if code not in _looks:
        _looks[code] = {each.offset for each in dis.get_instructions(code) if each.opname.startswith(LOOKS)}
    return _looks[code]


class Places:
    """Raises Interrupted at the `number`-th place that a call comes to; counts from 0. Says whether it came so far."""

    def __init__(self, number: int) -> None:
        self._left = number
        self.where = ""

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        if os.path.dirname(frame.f_code.co_filename) == HERE:
            return None
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        looks = _looks_of(frame.f_code)
        before = -1

        def inside(frame: FrameType, event: str, argument: Any) -> Any:
            nonlocal before
            if event == "opcode":
                last, before = before, frame.f_lasti
                if last in looks and not self.where:
                    if self._left == 0:
                        self.where = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
                        raise Interrupted(self.where)
                    self._left -= 1
            return inside

        return inside

    def run(self, call: Callable[[], Any]) -> Any:
        sys.settrace(self._trace)
        try:
            return call()
        finally:
            sys.settrace(None)


def interrupted_at(number: int, call: Callable[[], Any]) -> tuple[str, Any]:
    """Interrupts `call` at that place. Returns where that was, "" if it has no such place, and what the call returned
    or raised."""
    places = Places(number)
    try:
        result = places.run(call)
    except Interrupted as error:
        result = error
    return places.where, result
