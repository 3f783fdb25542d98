"""What the host process runs: the user's program, with the model that it trains."""
