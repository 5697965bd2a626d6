"""What carries rounds between workers."""
