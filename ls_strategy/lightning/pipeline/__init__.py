"""Pipelines under Lightning: the user's steps on micro-batches, what they log, draw, and weigh in the loss."""
