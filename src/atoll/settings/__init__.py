"""Run files: sections, defaults, checks and conflicts."""
