"""Implements `atoll plan`."""
