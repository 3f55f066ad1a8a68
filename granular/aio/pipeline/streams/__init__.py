"""Streams: sequential elements with a resumable state."""
