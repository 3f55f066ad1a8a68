"""Data sources: ArrayRecord, Parquet, TFRecord and WebDataset files, and windows over tokens. Async API."""
