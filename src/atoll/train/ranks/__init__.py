"""The ranks of a worker and the worker's place in a run."""
