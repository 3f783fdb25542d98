"""What belongs to a process: its role, its torch, its settings and threads."""
