"""What a session trains, and which tensors of it the session holds."""
