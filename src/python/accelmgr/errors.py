"""The exceptions of accelmgr, one class per cause. A message says what was wrong, where, and what would be right."""

from __future__ import annotations

import builtins
import re
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from accelmgr import StepResult


class Error(Exception):
    """Base of all exceptions of accelmgr. They pickle."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self.args, self.__dict__


class UsageError(Error, RuntimeError):
    """The caller broke a rule of the interface: a call after stop(), two threads in one manager, another's model."""


class ConfigError(Error, ValueError):
    """The configuration is invalid. `key`: the dotted path of the key at fault; empty when it is no single one."""

    def __init__(self, message: str, key: str = "") -> None:
        super().__init__(message)
        self.key = key


class ModelError(Error, ValueError):
    """The model cannot be built or bound, or its output is not what a model must return."""


class DataError(Error, ValueError):
    """The data cannot be read, or an element has another dtype or shape than the first one."""


class SessionError(Error, RuntimeError):
    """The session cannot be made or used: too little memory, a layout of another build, the manager is gone."""


class CheckpointError(Error, OSError):
    """A checkpoint cannot be read or written."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class SystemError(Error, OSError):  # The name it has in C++.
    """A system call failed. `code`: the value of errno."""

    def __init__(self, message: str, code: int = 0) -> None:
        super().__init__(message)
        self.code = code

    def __str__(self) -> str:
        return str(self.args[0])


class ForkHangs(SessionError):
    """A fork of this process did not come to life: another thread held a lock that it needs."""


class RunnerError(Error, RuntimeError):
    """A runner failed. `rank`: its rank, -1 when no single runner is at fault; `phase`: what it was doing."""

    def __init__(self, message: str, rank: int = -1, phase: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.phase = phase


class DeviceError(Error, RuntimeError):
    """The device of a runner failed: it is out of memory, was lost, or hangs. The runner ends with it, and is replaced.

    A step reports it in the text of its result.
    """


class CollectiveError(Error, RuntimeError):
    """A collective could not be completed. `cause`: mismatch, timeout, lost or broken; `ranks`: the ranks at fault."""

    def __init__(self, message: str, cause: str = "broken", ranks: list[int] | None = None) -> None:
        super().__init__(message)
        self.cause = cause
        self.ranks = ranks or []


class SpawnError(Error, RuntimeError):
    """A launched process failed; the others were ended because of it. The message has all of the values below.

    They describe the process that failed first. `rank`: its rank in the world. `exit_code`: 0 when a signal killed it.
    `signal`: 0 when it exited. `trace`: its traceback; empty when it reported none. `type`: the type of its exception.
    `phase`: start, setup or function. `later`: the processes that failed after it by themselves.
    """

    def __init__(
        self,
        message: str,
        rank: int = -1,
        exit_code: int = 0,
        signal: int = 0,
        trace: str = "",
        type: str = "",
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
    """A step is not `ok`. `status` and `rank` (-1: none) are those of the StepResult; `step` is the step's number."""

    status = ""

    def __init__(self, message: str, step: int = 0, rank: int = -1) -> None:
        super().__init__(message)
        self.step = step
        self.rank = rank


class DataEnd(StepError):
    """The dataset has ended."""

    status = "data_end"


class RunnerLost(StepError):
    """A runner died or failed. The message says how: its signal, its exit code, or what it raised."""

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
    """The manager process is gone; recover() starts a new one over the same session."""

    status = "manager_lost"


class StepModelError(ModelError, StepError):
    """The model has raised, or cannot be trained.

    `__cause__`: an exception of the type and text of its own, made again here, if the type is built into Python; else
    None.
    """

    status = "runner_lost"


class StepDataError(DataError, StepError):
    """The dataset has raised, or an element cannot be used. `__cause__`: as in StepModelError."""

    status = "data_end"


_BY_TYPE: dict[str, type[StepError]] = {"ModelError": StepModelError, "DataError": StepDataError}
_BY_STATUS: dict[str, type[StepError]] = {
    error.status: error for error in (DataEnd, RunnerLost, Nonfinite, StepTimeout, ManagerLost)
}


def raise_for(result: StepResult) -> NoReturn:
    """Raises the error of a result that is not `ok`."""
    kind = _BY_TYPE.get(result.error_type) or _BY_STATUS[result.status]
    raise kind(f"step {result.step + 1}: {result.error}", result.step + 1, result.rank) from _cause_of(result)


def _cause_of(result: StepResult) -> BaseException | None:
    """The exception of the user's code, made again from its text; its traceback is in the text of the error."""
    if not result.error_type:
        return None
    first = result.error.partition("\n")[0]
    for found in re.finditer(r"\b([A-Z]\w*): ", first):
        kind = getattr(builtins, found.group(1), None)
        if isinstance(kind, type) and issubclass(kind, Exception):
            try:
                made: BaseException = kind(first[found.end() :])
            except TypeError:  # UnicodeDecodeError, for example, takes more than a text.
                return None
            return made
    return None
