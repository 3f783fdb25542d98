"""Options of spawn() and of its kin: checked, and as text for the extension module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from accelmgr.errors import ConfigError


def text_of(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, tuple)):
        return ",".join(text_of(item) for item in value)
    return str(value)


def seconds_of(timeout: Any, name: str = "timeout") -> float:
    """Seconds of a number or a datetime.timedelta. Raises ConfigError for anything else."""
    if hasattr(timeout, "total_seconds"):
        return float(timeout.total_seconds())
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
        raise ConfigError(f"{name} is a {type(timeout).__name__}; it must be a timedelta or a number of seconds", name)
    return float(timeout)


def int_of(options: Mapping[str, Any], name: str, default: int) -> int:
    value = options.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name} is {value!r}; it must be a whole number", name)
    return value


def known_only(function: str, options: Mapping[str, Any], known: Sequence[str]) -> None:
    for name in options:
        if name not in known:
            raise TypeError(f"{function}() got an unexpected argument '{name}'; it takes {', '.join(known)}")
