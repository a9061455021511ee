"""Several ranks work on the same tokens, each with its part of a model: tensor and sequence parallelism.

Parameters and activations are plain local tensors. ``styles`` is the language of a plan, ``cuts`` checks it against a
model, ``tensor`` applies it; ``regions`` are the collectives that autograd knows, ``random`` keeps dropout right.
"""
