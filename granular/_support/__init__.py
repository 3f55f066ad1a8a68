"""Helpers for all other parts: late imports, texts of messages, types, indices, names of other libraries."""
