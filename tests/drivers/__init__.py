"""Training programs of other frameworks, each of which logs the ids that its training step sees.

A program of ``programs/`` runs all its cases in one process, or in one process per rank of torchrun, and writes a
``Result`` per case. The tests compare the results. ``make test-drivers`` runs them, in an environment that has the
frameworks; ``make test`` does not. ``python -m tests.drivers`` prints the table for docs/frameworks.md.
"""
