"""Operations on flat buffers, one pass over memory each: optimizer updates, moment formats, gradient norms.

Every operation has a reference in plain torch (`reference`, `norm`, `moments`) that defines its result to the last bit,
and a kernel in C++ or CUDA (``csrc``) that is compiled at first use (`_build`) and gives the same bits in fewer passes.
"""
