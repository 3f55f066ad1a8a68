"""The Loader, batch assembly and checkpoints."""
