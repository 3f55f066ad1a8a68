"""Bags: files of consecutive records, with a table of their limits."""
