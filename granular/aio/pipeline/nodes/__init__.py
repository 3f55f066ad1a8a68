"""Nodes of a lazy dataset: each computes elements from their indices."""
