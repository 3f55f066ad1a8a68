"""Datasets with fields that are loaded separately."""
