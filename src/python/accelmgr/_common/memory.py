# Runs in: all processes.
"""The name under which the extension module finds accelmgr._memory.tensors."""

from accelmgr._memory.tensors import named_tensors

__all__ = ["named_tensors"]
