"""Benchmarks: every bar is a ratio inside one run. ``make bench`` prints them; docs/performance.md keeps them."""
