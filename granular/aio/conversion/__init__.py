"""Conversion of data in other formats into sharded datasets."""
