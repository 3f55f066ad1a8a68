"""S3 and S3-compatible servers."""
