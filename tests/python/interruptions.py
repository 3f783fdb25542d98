"""Raises in Python code of this thread where the interpreter may call a signal handler, at one place after another."""

from __future__ import annotations

import dis
import os
import sys
import threading
import weakref
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


def _is_left_out(code: CodeType) -> bool:
    """Code of tests, and callbacks of weak references: Python ignores what they raise, and keeps their frames."""
    return os.path.dirname(code.co_filename) == HERE or code.co_filename == weakref.__file__


class Places:
    """Raises Interrupted at the `number`-th place that a call comes to; counts from 0. Says whether it came so far."""

    def __init__(self, number: int) -> None:
        self._left = number
        self.where = ""

    def _comes_to(self, frame: FrameType, last: int) -> None:
        """Before each instruction; last: the offset of the one before it in this frame, or -1."""
        if last in _looks_of(frame.f_code) and not self.where:
            if self._left == 0:
                self.where = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
                raise Interrupted(self.where)
            self._left -= 1

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        if _is_left_out(frame.f_code):
            return None
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        before = -1

        def inside(frame: FrameType, event: str, argument: Any) -> Any:
            nonlocal before
            if event == "opcode":
                last, before = before, frame.f_lasti
                self._comes_to(frame, last)
            return inside

        return inside

    def run(self, call: Callable[[], Any]) -> Any:
        if sys.version_info >= (3, 12):
            return self._run_monitored(call)
        sys.settrace(self._trace)
        try:
            return call()
        finally:
            sys.settrace(None)

    def _run_monitored(self, call: Callable[[], Any]) -> Any:
        """settrace() tells of no instructions of a function that is called for the first time."""
        monitoring: Any = sys.monitoring  # type: ignore[attr-defined]
        this_thread, before = threading.get_ident(), dict[FrameType, int]()

        def instruction(code: CodeType, offset: int) -> None:
            if threading.get_ident() == this_thread and not _is_left_out(code):
                frame = sys._getframe(1)
                last, before[frame] = before.get(frame, -1), offset
                self._comes_to(frame, last)

        monitoring.use_tool_id(monitoring.PROFILER_ID, "interruptions")
        monitoring.register_callback(monitoring.PROFILER_ID, monitoring.events.INSTRUCTION, instruction)
        monitoring.set_events(monitoring.PROFILER_ID, monitoring.events.INSTRUCTION)
        try:
            return call()
        finally:
            monitoring.set_events(monitoring.PROFILER_ID, 0)
            monitoring.register_callback(monitoring.PROFILER_ID, monitoring.events.INSTRUCTION, None)
            before.clear()  # Frames keep what they have.
            monitoring.free_tool_id(monitoring.PROFILER_ID)


def interrupted_at(number: int, call: Callable[[], Any]) -> tuple[str, Any]:
    """Interrupts `call` at that place. Returns where that was, "" if it has no such place, and what the call returned
    or raised."""
    places = Places(number)
    try:
        result = places.run(call)
    except Interrupted as error:
        result = error
    return places.where, result
