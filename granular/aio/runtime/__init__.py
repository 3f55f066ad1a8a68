"""Event loops, the bridge from threads to them, thread pools, and lifecycles."""
