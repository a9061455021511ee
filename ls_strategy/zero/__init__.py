"""The ZeRO engine's parts: units, gather, reduce, optimizer, step, hooks."""
