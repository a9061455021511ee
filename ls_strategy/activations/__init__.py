"""Memory of activations: recompute, offload and partitioning, configured in the strategy and not in the model."""
