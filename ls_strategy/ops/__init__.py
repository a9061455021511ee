"""Operations on flat buffers, one pass over memory each: optimizer updates, moment formats, gradient norms.

Every operation has a reference in plain torch (`reference`, `norm`, `moments`) that defines its result bit for bit. A
kernel in C++ or CUDA (``csrc``), compiled at first use (`_build`), returns the same bits in fewer passes.
"""
