"""Checkpoints under Lightning: what they contain, as which kind they are saved, and how a run resumes from them."""
