"""Pretraining: data, optimizer, step, loop, checkpoints, metrics."""
