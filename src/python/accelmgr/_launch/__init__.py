"""Runs functions of Python in processes: what spawn() of accelmgr.distributed and of accelmgr.compat is built on."""

from __future__ import annotations

import os

from accelmgr import _native


def refresh_environment() -> None:
    """Copies the environment of the C side into os.environ. A launch sets variables there."""
    now = dict(_native.environment())
    for name in set(os.environb) - set(now):
        del os.environb[name]
    for name, value in now.items():
        if os.environb.get(name) != value:
            os.environb[name] = value
