"""Pipeline parallelism: every rank holds some of a model's blocks, and micro-batches pass from rank to rank.

The user's function ``step(micro_batch) -> loss`` stays as it is and is called on every rank for every forward action.
What comes before this rank's blocks computes shapes only (`placeholder`), the first block of a stage gets the
activation received, and the call ends early where the next stage's blocks begin (`stage`). `cut` shards the model,
`schedules` says who does what in which order, `simulate` checks that, `runner` carries it out, `timeline` shows what
happened.

::

    block    one module of the stack that is cut
    stage    blocks that run in one go; numbered from input to output
    rank     a member of the pipeline; holds one stage, or several
    action   F forward, B backward, I gradient of the inputs, W gradient of the weights: of a stage and a micro-batch
"""
