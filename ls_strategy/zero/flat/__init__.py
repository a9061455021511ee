"""Flat buffers: the memory of parameters, gradients and masters, and who may write to it."""
