"""Ranks: how they find each other, exchange tensors, agree, and say where they are."""
