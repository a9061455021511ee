"""Pipeline parallelism: every rank holds some of a model's blocks, and micro-batches pass from rank to rank.

The user's function ``step(micro_batch) -> loss`` does not change and is called on every rank for every forward action.
Code before this rank's blocks computes shapes only (`placeholder`). The first block of a stage gets the received
activation, and the call ends early where the blocks of the next stage begin (`stage`). `partition` splits the model,
`schedules` defines the order of actions, `simulate` checks it, `runner` executes it, and `timeline` shows the result.

::

    block    one module of the partitioned stack
    stage    blocks that run together; numbered from input to output
    rank     a member of the pipeline; holds one or more stages
    action   F forward, B backward, I gradient of the inputs, W gradient of the weights: of a stage and a micro-batch
"""
