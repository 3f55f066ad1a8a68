"""Batches, steps and checkpoints."""
