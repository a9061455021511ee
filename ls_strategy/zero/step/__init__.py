"""From averaged gradients to new weights: norm, clipping, the user's optimizer, its states, publication."""
