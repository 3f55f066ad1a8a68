"""Streams: elements one after the other, and their state."""
