"""Evaluates exported models on tasks of lm-evaluation-harness, an optional extra, with data from local files."""
