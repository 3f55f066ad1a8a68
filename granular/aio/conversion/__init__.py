"""Conversion of data in other formats to sharded datasets."""
