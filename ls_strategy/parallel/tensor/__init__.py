"""Tensor parallelism: a plan for the layers of a model, found or given, and what carries it out.

`plans` finds the plan, `resolved_plan` checks it against the model, and `shard` applies it. `sequence` shards the
tokens between the layers, and `dtensor` takes models that torch's ``parallelize_module`` has sharded.
"""
