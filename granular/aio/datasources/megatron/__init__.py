"""Datasets of tokens of Megatron: an index and its data in two files."""
