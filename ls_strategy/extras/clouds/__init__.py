"""Jobs outside of SLURM: Kubeflow Trainer (`kubeflow`), SkyPilot (`skypilot`), plain torchrun (`torchrun`).

Every module makes the text of one file from a `Run`. Uses only the standard library, and PyYAML for YAML.
"""
