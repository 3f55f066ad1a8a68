"""Fuzzing of what reads bytes of others: ``python -m tests.robustness.fuzz TARGET --seconds N``."""
