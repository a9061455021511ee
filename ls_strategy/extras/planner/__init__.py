"""Predict a run's memory by tier, traffic and time before it starts, and choose a strategy that fits.

::

    module, batch ─ trace ──> Trace: one step on fake tensors, as a list of events
    options ─ layout ──> Plan: the engine's own plan, for any number of ranks
    Trace + Plan ─ replay ──> Peak: the events, simulated under the engine's rules
    candidates, Hardware ─ forecast ──> table, and a recommendation

One trace is taken per recompute policy; everything else is computed from it.
"""
