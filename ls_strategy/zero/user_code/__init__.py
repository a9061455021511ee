"""What user code sees between the passes: gradients as under DDP, parameters on demand, copies."""
