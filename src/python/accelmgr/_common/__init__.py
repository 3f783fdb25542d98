"""What several processes run."""
