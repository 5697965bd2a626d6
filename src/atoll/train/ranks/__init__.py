"""How a process finds its place in a run, and how it works with the other processes."""
