"""What becomes of a model after the start: by its own forward(), by the host, and by calls of the host."""
