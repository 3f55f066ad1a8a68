"""Pipelines: lazy datasets, streams, samplers, transformations and the DataLoader."""
