"""``ls-strategy doctor``: whether this machine can train, and what stands in the way. One file per topic.

Every check is a function that yields a `Finding` for each fact; `examine` runs them all.
"""
