"""ArrayRecord files."""
