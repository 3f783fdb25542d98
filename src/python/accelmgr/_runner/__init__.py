"""What the manager process and the runners run."""
