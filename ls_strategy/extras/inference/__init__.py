"""Inference with trained models: cached generation, tensor parallelism, weight quantization and streaming."""
