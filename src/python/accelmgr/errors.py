"""What accelmgr raises. One class per cause; the message names what was wrong, where, and what would be right."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from accelmgr import StepResult


class Error(Exception):
    """Base of all exceptions of accelmgr. They pickle."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self.args, self.__dict__


class UsageError(Error, RuntimeError):
    """A rule of the interface was broken: a call after stop(), two threads in one manager, another manager's model."""


class ConfigError(Error, ValueError):
    """A configuration that cannot be used. `key`: the dotted path, empty when no single key is at fault."""

    def __init__(self, message: str, key: str = "") -> None:
        super().__init__(message)
        self.key = key


class ModelError(Error, ValueError):
    """A model that cannot be built or bound, or whose output is not what a model must return."""


class DataError(Error, ValueError):
    """Data that cannot be read, or an element of another dtype or shape than the first."""


class SessionError(Error, RuntimeError):
    """The session cannot be made or used: too little memory, a stranger's layout, the manager is gone."""


class CheckpointError(Error, OSError):
    """A checkpoint that cannot be read or written."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class SystemError(Error, OSError):  # noqa: A001  (the name it has in C++)
    """A system call failed. `code`: the value of errno."""

    def __init__(self, message: str, code: int = 0) -> None:
        super().__init__(message)
        self.code = code

    def __str__(self) -> str:
        return str(self.args[0])


class RunnerError(Error, RuntimeError):
    """A runner failed. `rank` is -1 when no single one is at fault; `phase`: what it was doing."""

    def __init__(self, message: str, rank: int = -1, phase: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.phase = phase


class CollectiveError(Error, RuntimeError):
    """A collective could not be completed. `cause`: mismatch, timeout, lost or broken; `ranks`: whose fault it was."""

    def __init__(self, message: str, cause: str = "broken", ranks: list[int] | None = None) -> None:
        super().__init__(message)
        self.cause = cause
        self.ranks = ranks or []


class SpawnError(Error, RuntimeError):
    """A launched process failed, the first in time; the others were ended because of it. The message says all of it.

    `rank`: in the world; `exit_code`: 0 when a signal killed it; `signal`: 0 when it exited; `trace`: its traceback,
    empty when it could not say; `type`: of its exception; `phase`: start, setup or function; `later`: those that failed
    after it, of themselves.
    """

    def __init__(
        self,
        message: str,
        rank: int = -1,
        exit_code: int = 0,
        signal: int = 0,
        trace: str = "",
        type: str = "",  # noqa: A002
        phase: str = "",
        later: list[str] | None = None,
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.exit_code = exit_code
        self.signal = signal
        self.trace = trace
        self.type = type
        self.phase = phase
        self.later = later or []


class StepError(Error, RuntimeError):
    """A step that is not `ok`. `status` and `rank` (-1: none) are those of the StepResult, `step` is its number."""

    status = ""

    def __init__(self, message: str, step: int = 0, rank: int = -1) -> None:
        super().__init__(message)
        self.step = step
        self.rank = rank


class DataEnd(StepError):
    """The dataset has ended, or failed: the message has its exception then."""

    status = "data_end"


class RunnerLost(StepError):
    """A runner died or failed: the message has its exception or signal."""

    status = "runner_lost"


class Nonfinite(StepError):
    """A loss or gradient was not finite."""

    status = "nonfinite"


class StepTimeout(StepError, TimeoutError):
    """The deadline of the step passed."""

    status = "timeout"

    def __str__(self) -> str:
        return str(self.args[0])


class ManagerLost(StepError):
    """The manager process is gone; recover() starts another over the same session."""

    status = "manager_lost"


_BY_STATUS: dict[str, type[StepError]] = {
    error.status: error for error in (DataEnd, RunnerLost, Nonfinite, StepTimeout, ManagerLost)
}


def raise_for(result: StepResult) -> NoReturn:
    """Raises the error of a result that is not `ok`."""
    raise _BY_STATUS[result.status](f"step {result.step + 1}: {result.error}", result.step + 1, result.rank)
