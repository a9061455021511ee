"""Mixture of Experts: feed-forward layers in which a router selects a few experts for each token.

::

    x ─► router: experts and weights ─► capacity: which pairs are dropped
    │                                                     │ (token, expert) pairs
    └─► dispatch: by expert ─► to the experts' ranks ─► grouped products ─► back ─► weighted sum per token

Models use ``layer``; ``parallel`` shards its experts over ranks. ``losses`` and ``balance`` balance the load of the
experts: by a loss, or by a bias of the router that follows the loads.
"""
