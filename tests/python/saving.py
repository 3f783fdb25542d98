"""Checkpoints that are written when a test goes on."""

from __future__ import annotations

from typing import Any

import accelmgr


def save(manager: accelmgr.Manager, **states: Any) -> accelmgr.CheckpointWritten:
    """The checkpoint of now, with states of save_checkpoint()."""
    manager.save_checkpoint(**states)
    (written,) = manager.checkpoints_written(wait=120)
    assert written.error == ""
    return written
