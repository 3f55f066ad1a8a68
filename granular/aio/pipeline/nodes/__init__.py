"""Nodes of lazy sequences: what is computed of each index."""
