"""The local web page of ``granular view``, which shows what is in a bucket or folder."""

from typing import TYPE_CHECKING

from granular._support.lazy import lazy_names

if TYPE_CHECKING:
    from granular.view.server import run as run
    from granular.view.server import serve as serve
else:
    lazy_names(__name__, {'granular.view.server': 'run serve'})  # it needs aiohttp
