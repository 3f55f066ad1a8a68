"""Benchmarks: every bar is a ratio within one run. ``make bench`` prints them; docs/performance.md records them."""
