"""Data sources: files of other formats, and windows over episodes. Async API."""
