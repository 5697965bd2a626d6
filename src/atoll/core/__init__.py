"""Computes with numbers and tensors alone: torch and integers; no files, clock, environment, logging or threads."""
