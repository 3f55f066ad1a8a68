"""S3 and servers of its protocol."""
