"""The link between machines."""
