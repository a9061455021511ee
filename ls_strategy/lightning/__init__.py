"""The edge to PyTorch Lightning: the strategy, and what its hooks are made of."""
