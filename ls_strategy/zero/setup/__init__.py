"""From a model and its optimizers to a sharded model: checks, units, memory, values."""
