"""Benchmarks: every bar is a ratio within one run. ``make bench`` prints them; benchmarks/bars.md records them."""
