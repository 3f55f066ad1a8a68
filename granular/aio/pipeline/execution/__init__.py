"""Prefetching in threads, on the event loop and in worker processes."""
