"""Step tensors that need to be full: each by the one rank that owns it."""
