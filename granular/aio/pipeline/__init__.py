"""Pipelines: lazy sequences over readers, and the streams, workers and states that are made of them."""
