"""Tensor, sequence and pipeline parallelism: several ranks work on the same batch, each with a shard of the model.

Parameters and activations are plain local tensors. `styles` defines what a tensor-parallel plan may contain, `plans`
finds one, `resolved_plan` checks it against a model, and `tensor` applies it. `regions` has the collectives that
autograd knows, `random` keeps dropout correct.
"""
