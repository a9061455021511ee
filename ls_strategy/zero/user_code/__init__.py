"""Present a sharded model to user code between the passes: gradients as under DDP, parameters on demand, copies."""
