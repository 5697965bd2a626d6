"""Runs the outer loop of DiLoCo, Streaming DiLoCo and Eager Updates."""
