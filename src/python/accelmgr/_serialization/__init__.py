"""How objects of the script become bytes: for another process, or for a checkpoint."""
