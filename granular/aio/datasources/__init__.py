"""Data sources: files of other formats, and windows over tokens. Async API."""
