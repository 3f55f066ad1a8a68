"""Paths and files."""
