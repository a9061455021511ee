"""Side products: each can be absent. The core imports none of them; it finds them through `ls_strategy.extensions`.

====================  ================================================================================================
``callbacks``         what a Trainer can watch and do beside training: Monitor, ShardedEMA, PreemptionHandler ...
``cli``               the command ``ls-strategy``
``clouds, slurm``     batch scripts and jobs that run a program on many nodes
``conformance``       habits of people under any strategy of Lightning: what comes out right
``data_efficiency``   curricula, packed documents, dropped tokens
``deepspeed``         its configurations, schedules and checkpoints
``doctor``            checks of a machine
``huggingface``       folders that ``from_pretrained`` opens, from a run or from its checkpoints
``inference``         generation and streamed evaluation
``islands``           DiLoCo: runs that exchange rarely
``planner``           memory and time of a run before it starts, and the choice of ``stage="auto"``
``plots, report``     figures, and a page about a run
``ray``               the strategy in train functions of Ray
``snapshots``         checkpoints in memory, from which an elastic run continues
====================  ================================================================================================

Short paths leave the folder's name out: ``ls_strategy.ray`` is ``ls_strategy.extras.ray``.
"""
