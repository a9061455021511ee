"""Memory of activations, chosen in the strategy and not in the model: recompute, offload, partition."""
