"""The sync API: blocking methods over the async core."""
