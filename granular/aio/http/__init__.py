"""HTTP/1.1: connections, limits, retries, and checks of every reply."""
