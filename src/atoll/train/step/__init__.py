"""One inner step: gradients, optimizer and learning rate."""
