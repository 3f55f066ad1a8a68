"""Fuzzing of what reads bytes of others: ``python -m tests.fuzz TARGET --seconds N``."""
