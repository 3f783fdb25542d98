"""Results of steps in TensorBoard."""

from __future__ import annotations

import os

from accelmgr import StepResult
from accelmgr.errors import UsageError


class Writer:
    """Writes StepResults to a folder for `tensorboard --logdir`: `loss`, the model's scalars under `metrics/`, samples
    per second as `throughput`, and the milliseconds of each phase under `time/`.

        with accelmgr.tensorboard.Writer("runs/first") as writer:
            for result in manager.steps(100):
                writer.add(result)

    log_dir: created if it is missing. Raises UsageError if tensorboard is not installed (accelmgr[tensorboard]). One
    thread at a time.
    """

    def __init__(self, log_dir: str | os.PathLike[str]) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise UsageError("TensorBoard's writer needs tensorboard: pip install 'accelmgr[tensorboard]'") from None
        self._writer = SummaryWriter(os.fspath(log_dir))

    def add(self, result: StepResult, **metrics: float) -> None:
        """Writes a step that is `ok` and counted; ignores any other. metrics: further numbers, under `metrics/` too."""
        if not result.ok or not result.counted:
            return
        step = result.step
        self._writer.add_scalar("loss", result.loss, step)
        for name, value in {**result.scalars, **metrics}.items():
            self._writer.add_scalar(f"metrics/{name}", value, step)
        if result.step_ms > 0:
            self._writer.add_scalar("throughput", result.samples / result.step_ms * 1e3, step)
        for phase in ("compute_ms", "reduce_ms", "wait_ms", "step_ms"):
            self._writer.add_scalar(f"time/{phase}", getattr(result, phase), step)

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        """Writes what is buffered and closes the files. Idempotent."""
        self._writer.close()

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()
