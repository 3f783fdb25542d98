# Runs in: an interpreter that accelmgr executes, or has forked.
"""The name under which the extension module and `accelmgr serve` find accelmgr._process.child."""

from accelmgr._process.child import begin_forked, forget_values, main, serve

__all__ = ["begin_forked", "forget_values", "main", "serve"]
