"""The local web page of ``granular view``, which shows what is in a bucket or folder."""

from granular.view.server import run, serve

__all__ = ['run', 'serve']
