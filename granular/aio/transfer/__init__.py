"""Copies on the local disk, and archives."""
