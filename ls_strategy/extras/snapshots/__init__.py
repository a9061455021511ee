"""Snapshots: checkpoints in the memory of the nodes, which outlive the processes that train.

::

    every few steps   each rank writes its part into its node's memory, and a copy into its buddy's   `write`, `server`
    after a loss      the ranks that are there find the newest complete snapshot                      `find`
                      and read it as a checkpoint folder whose files lie on several nodes             `remote`
"""
