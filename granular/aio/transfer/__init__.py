"""Copies to the local disk, and archives."""
