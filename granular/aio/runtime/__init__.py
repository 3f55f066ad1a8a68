"""Event loops, the portal from threads to them, thread pools, and lifecycles."""
