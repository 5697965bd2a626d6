"""Gives a process its place in a run and lets it work with the worker's other processes."""
