"""Hypothesis without deadlines: the machines that run this are shared."""

from hypothesis import settings

settings.register_profile("shared machines", deadline=None)
settings.load_profile("shared machines")
