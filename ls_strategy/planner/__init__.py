"""What a run will take before it runs: memory by tier, traffic, time, and the lightest strategy that fits.

::

    module, batch ─ trace ──> Trace: one step on tensors without memory, as a list of events
    options ─ layout ──> Plan: the engine's own plan, for any number of ranks
    Trace + Plan ─ replay ──> Peak: the events run through the engine's rules on paper
    candidates, Hardware ─ forecast ──> table, and a recommendation

A trace is taken once for each way of recomputing activations; everything else is counted from it.
"""
