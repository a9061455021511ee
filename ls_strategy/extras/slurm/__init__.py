"""SLURM: batch scripts. What this process knows of its own job is in `ls_strategy.distributed.launch.slurm_job`.

Uses only the standard library.
"""
