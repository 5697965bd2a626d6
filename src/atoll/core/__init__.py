"""The arithmetic: torch and integers; no files, clock, environment, logging or threads."""
