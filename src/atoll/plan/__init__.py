"""What a run costs before it is paid for: numbers only, no tensors."""
