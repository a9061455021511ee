"""Losses of logits that are computed in chunks of tokens and never held in full."""
