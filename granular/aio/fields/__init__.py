"""Datasets of fields, of which those asked for are loaded."""
