"""Shows runs while they train: one page, served live or frozen into a file."""
