"""Datasets: specs, layouts and shards, stored in bags."""
