# Runs in: the host.
"""The former name of accelmgr._host.checkpoint_state, for scripts that try states without a manager."""

from accelmgr._host.checkpoint_state import collected, restored

__all__ = ["collected", "restored"]
