"""CIFAR-10 classifiers: ``python -m recipes.cifar fit --config recipes/cifar/configs/base.yaml``."""
