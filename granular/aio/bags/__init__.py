"""Bags: records one after the other, with a table of their limits."""
