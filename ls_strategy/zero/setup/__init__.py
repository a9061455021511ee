"""Set up a sharded model from a model and its optimizers: checks, units, memory, values."""
