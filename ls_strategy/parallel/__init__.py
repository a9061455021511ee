"""Tensor, sequence, context and pipeline parallelism: several ranks work on the same batch.

``tensor/``    layers are sharded over ranks
``context/``   the tokens of a sequence are
``pipeline/``  the blocks are

Parameters and activations are plain local tensors. `styles` defines what a tensor-parallel plan may contain. `regions`
has the collectives that autograd knows, `random` keeps dropout correct, and `logits` makes sharded logits look whole.
"""
