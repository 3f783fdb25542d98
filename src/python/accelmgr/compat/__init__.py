"""The interfaces that accelmgr takes the place of, each with its own names, signatures and defaults."""
