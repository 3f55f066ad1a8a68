"""Event loops, the bridge to threads, and lifecycles."""
