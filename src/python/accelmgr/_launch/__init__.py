"""Runs functions of Python in processes: what spawn() of accelmgr.distributed and of accelmgr.compat is built on."""
