# Runs in: all processes.
"""The name under which the extension module finds accelmgr._serialization.describe."""

from accelmgr._serialization.describe import describe

__all__ = ["describe"]
