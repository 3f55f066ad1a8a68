"""The block cache on the local disk."""
