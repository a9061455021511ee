"""The ZeRO engine's parts, in the order in which a run meets them.

``setup/``      from a model and its optimizers to flat buffers
``passes/``     forward and backward: gather parameters, average gradients
``user_code/``  between the passes: parameters and gradients as under DDP
``step/``       from averaged gradients to new weights
``flat/``       the memory that all of them work on
"""
