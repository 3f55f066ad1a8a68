"""Datasets: specs, layouts and shards over bags."""
