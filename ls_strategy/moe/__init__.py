"""Mixture of Experts: a feed-forward layer of which every token uses a few parts.

::

    x ─► router: which experts, with what weight ─► capacity: who is dropped
    │                                                     │ (token, expert) pairs
    └─► dispatch: by expert ─► to the experts' ranks ─► grouped products ─► back ─► weighted sum per token

``layer`` is what a model uses, ``parallel`` shards its experts over ranks. ``losses`` and ``balance`` keep the experts
equally busy: by a loss, or by a bias of the router that follows the loads.
"""
