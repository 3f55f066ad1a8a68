"""Tar files of WebDataset."""
