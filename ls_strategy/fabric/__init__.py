"""The same engine for loops that users write with Lightning Fabric. `strategy.py` is the entry."""
