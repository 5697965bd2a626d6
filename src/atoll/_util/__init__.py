"""Holds small helpers that every layer may use."""
