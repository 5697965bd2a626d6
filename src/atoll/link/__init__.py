"""Links carry rounds between workers: in one process, between machines, behind an emulated line."""
