"""The local web page of ``granular view``, which shows what is in a bucket or folder."""

from typing import TYPE_CHECKING

from granular._lazy import lazy_getattr

if TYPE_CHECKING:
    from granular.view.server import run, serve

__all__ = ['run', 'serve']

__getattr__ = lazy_getattr(__name__, {'granular.view.server': 'run serve'})  # it needs aiohttp
