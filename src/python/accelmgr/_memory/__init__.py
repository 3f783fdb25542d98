"""Memory that processes share, and tensors in it."""
