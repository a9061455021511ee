"""A GPT with a Mixture of Experts: ``python -m recipes.moe fit --config recipes/moe/configs/base.yaml``."""
