"""`atoll plan`."""
