"""Turn averaged gradients into new weights: norm, clipping, the user's optimizer, its states, publication."""
