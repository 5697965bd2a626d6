"""Plans a run before it is paid for: numbers only, no tensors."""
