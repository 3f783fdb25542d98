# Runs in: all processes.
"""Texts of exceptions, for another process and for the records of the session."""

from __future__ import annotations

import traceback

from accelmgr.errors import Error

MOST_TEXT = 3500  # The longest text of an exception; the session has 4 KiB for it.


def encodable(text: str) -> str:
    """Escapes what is not UTF-8, for example in the name of a file."""
    return text.encode(errors="backslashreplace").decode()


def describe(error: BaseException) -> str:
    """The last line of its traceback, then the other lines. Of a long traceback the innermost frames."""
    if isinstance(error, Error):
        return encodable(str(error))
    lines = [encodable(line) for line in traceback.format_exception(error)]
    text = f"{lines[-1].strip()}\n{''.join(lines[:-1]).rstrip()}"
    if len(text) <= MOST_TEXT:
        return text
    head = f"{lines[-1].strip()[: MOST_TEXT // 2]}\n... "
    return head + text[len(head) - MOST_TEXT :]
