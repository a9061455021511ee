"""Models that are built without memory: `on_meta` records what is done to their tensors, for this rank's shards.

What moves or casts weights of files becomes a `recipe` by ranges; all else becomes a `program`, which `recording` notes
and which runs again where a parameter gets its memory. `deferred` keeps the values by parameter.
"""
