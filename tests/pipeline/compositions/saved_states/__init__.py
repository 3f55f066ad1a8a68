"""States that earlier releases have saved, and the pipelines which they belong to."""
