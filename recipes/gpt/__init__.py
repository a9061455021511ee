"""A GPT trained on text: ``python -m recipes.gpt fit --config recipes/gpt/configs/quickstart.yaml``."""
