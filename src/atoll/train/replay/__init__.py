"""Makes the rounds of an elastic run again from what its workers have recorded."""
