"""Models that are built without memory: what is done to their tensors is recorded, and replayed for a rank's shard."""
