"""Interfaces of other packages that accelmgr replaces, each with its own names, signatures and defaults."""
