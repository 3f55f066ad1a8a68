"""Integrations with other frameworks, one module each, imported only on demand."""
