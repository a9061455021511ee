"""What is about SLURM: the job this process runs in (`job`), checks before start (`preflight`), scripts (`script`).

Standard library only.
"""
