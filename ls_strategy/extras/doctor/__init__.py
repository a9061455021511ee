"""``ls-strategy doctor``: checks whether this machine can train. One file per topic.

Every check is a function that yields a `Finding` for each fact. `examine` runs them all.
"""
