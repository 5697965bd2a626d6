"""The outer loop: DiLoCo, Streaming DiLoCo and Eager Updates."""
