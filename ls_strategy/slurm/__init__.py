"""SLURM: the job of this process (`job`), checks before the start (`preflight`), batch scripts (`script`).

Uses only the standard library.
"""
