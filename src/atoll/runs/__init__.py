"""The folder of a run and the events in it."""
