"""The CPU backend: a whole graph runs as one compiled plan."""
