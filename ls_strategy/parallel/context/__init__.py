"""Context parallelism: every rank has its own tokens of a sequence.

`ulysses` runs the blocks on them; around attention, `attention` exchanges tokens for heads, and `ring` passes keys and
values on. `tokens` slices what has a dimension of tokens, `token_check` finds out whether a block may work so.
"""
