"""Less computation early in training: shorter sequences (`curriculum`), fewer tokens (`token_dropping`).

Li et al., "DeepSpeed Data Efficiency", arXiv:2212.03597.
"""
