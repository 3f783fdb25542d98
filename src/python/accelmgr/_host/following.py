# Runs in: the host.
"""Tells runners, before each step, what the host has changed since they began."""

from __future__ import annotations

import logging
import os
import time
from typing import Any

import torch

from accelmgr._changes.grown_buffers import Forms
from accelmgr._changes.record import Record
from accelmgr._host.watch import Watch
from accelmgr._memory.tensors import bytes_of
from accelmgr._process import torch_settings
from accelmgr.errors import DataError

logger = logging.getLogger("accelmgr")

SHARE_OF_STEP = 0.01
"""Looking for changes takes at most this share of a step, or a warning says so."""
LEAST_S = 5e-4
"""A shorter look is not worth a warning."""
THEIR_OWN = frozenset({b"PYTEST_CURRENT_TEST", b"TORCHINDUCTOR_CACHE_DIR", b"TRITON_CACHE_DIR"})
"""Variables that pytest and torch set for themselves, and that change no number."""
LOOKS = 20
"""The cost of looks, or of new beginnings in a row, is judged after so many of them."""


def _current_folder() -> tuple[int, int]:
    found = os.stat(".")
    return found.st_dev, found.st_ino


class Following:
    """Exists while other processes have a model or a dataset of this process."""

    def __init__(
        self,
        model: torch.nn.Module | None,
        others: dict[str, Any],
        fixed: dict[str, Any],
        record: Record | None,
        kept: Forms,
        forks: bool,
    ) -> None:
        """others: the dataset, and functions that runners call, by name. fixed: what must not change: parts of a
        DataLoader, which is iterated from its beginning. record: None if there is no model. kept: see Watch.
        forks: processes are forks, so new ones begin also for settings and variables that a record cannot say in full.
        """
        self._model = model
        self._others = others
        self._fixed = Watch(None, fixed, {})
        self._record = record
        self._kept = kept
        self._forks = forks
        self._looked = self._between = 0.0
        self._looks = self._renewals = 0
        self._last = 0.0
        self._warned = False
        self._told: list[torch.Tensor] = []
        self.begin()

    def told(self) -> list[torch.Tensor]:
        """Tensors of which later forks can be told by their numbers. Call begin() when there are such forks."""
        self._told = self._watch.of_runners
        return self._told

    def begin(self) -> None:
        """Called when new processes begin, which know the present state."""
        self._settings = torch_settings.current()
        self._environment = dict(os.environb)
        self._folder = _current_folder()
        if self._record is not None:
            self._record.clear()
        self._watch = Watch(self._model, self._others, self._kept, self._forks, self._told)

    def look(self) -> str:
        """Publishes what a record can say. Returns what else has changed, in words; empty if nothing has.

        Raises DataError for a change of a DataLoader.
        """
        begin = time.perf_counter()
        if changed := self._fixed.changes().others:
            raise DataError(
                f"after the start '{changed[0]}' of the DataLoader was changed (set_epoch()?), but the process that "
                "reads iterates it from its beginning: pass the dataset instead of the loader, or start a manager for "
                "each epoch, with the same model and optimizer"
            )
        found = self._watch.changes()
        changes: dict[tuple[str, ...], Any] = {}
        for (path, name), value in found.attributes.items():
            changes["attribute", path, name] = value.detach() if isinstance(value, torch.Tensor) else value
        for number, tensor in found.tensors.items():
            changes["tensor", str(number)] = bytes_of(tensor)
        settings = torch_settings.current()
        if settings != self._settings:
            new = torch_settings.sendable(torch_settings.changed(self._settings, settings))
            changes |= {("setting", name): value for name, value in new.items()}
            if self._forks and (names := sorted(set(new) - {*torch_settings.OF_RUNNER, *torch_settings.OF_WORDS})):
                found.others.append(f"torch's setting '{names[0]}'")  # The process that reads the data has it, too.
            self._settings = settings
        if self._forks and (environment := dict(os.environb)) != self._environment:
            variables = {name for name, _ in environment.items() ^ self._environment.items()} - THEIR_OWN
            found.others += [f"the environment variable '{os.fsdecode(name)}'" for name in sorted(variables)]
            self._environment = environment
        if self._forks and (folder := _current_folder()) != self._folder:
            found.others.append("the current folder")
            self._folder = folder
        if changes and not found.others and self._record is not None:
            self._record.publish(changes)
        self._judge(begin, time.perf_counter(), found.others)
        return ", ".join(found.others[:3]) + (f" and {len(found.others) - 3} more" if len(found.others) > 3 else "")

    def _judge(self, begin: float, end: float, others: list[str]) -> None:
        """Warns once of looks and of new beginnings that take long."""
        self._between += begin - self._last if self._last else 0.0
        self._looked += end - begin
        self._last = end
        self._looks += 1
        self._renewals = self._renewals + 1 if others else 0
        if self._warned:
            return
        if self._renewals == LOOKS:
            self._warned = True
            logger.warning(
                "%s has changed before each of the last %d steps, so runners began anew for each; if runners need not "
                "know of it, pass refresh='never'",
                others[0],
                LOOKS,
            )
        elif self._looks == LOOKS:
            each = self._looked / self._looks
            if each > LEAST_S and self._looked > SHARE_OF_STEP * self._between:
                self._warned = True
                logger.warning(
                    "looking for changes of model and dataset takes %.1f of %.1f ms between steps (%d places); "
                    "refresh='never' does not look, and manager.refresh() tells runners of a change",
                    each * 1e3,
                    self._between / self._looks * 1e3,
                    len(self._watch),
                )
            self._looked = self._between = 0.0
            self._looks = 0
