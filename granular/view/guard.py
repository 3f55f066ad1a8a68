"""Access to the page: a token, the Host and Origin of requests, and the headers of replies.

The page can read with the credentials of its user, so only that user may open it. The link has a token, which becomes a
cookie that scripts cannot read and that other sites cannot send. A page of another site that resolves its own name to
127.0.0.1 is refused by the Host that it sends; a page of another server on this machine by Origin and Sec-Fetch-Site.
"""

import hmac
import secrets
from typing import Final
from urllib.parse import urlsplit

from aiohttp import web

HEADERS: Final = {
    'Content-Security-Policy': (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; media-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    'X-Content-Type-Options': 'nosniff',
    'X-Frame-Options': 'DENY',
    'Referrer-Policy': 'no-referrer',
    'Cross-Origin-Opener-Policy': 'same-origin',
    'Cross-Origin-Resource-Policy': 'same-origin',
    'Cache-Control': 'no-store',
    'Server': 'granular',
}

_LOOPBACK: Final = ('127.0.0.1', 'localhost', '::1')


class Guard:
    """Decides who may ask. One per server."""

    def __init__(self) -> None:
        self.token = secrets.token_urlsafe(24)  # of the link
        # Cookies belong to a host and not to a port: servers side by side need different names.
        self._cookie = f'granular-view-{secrets.token_hex(4)}'

    def refuse(self, request: web.Request) -> str:
        """Return why a request is refused; empty if it is not."""
        if request.method not in ('GET', 'HEAD'):
            return 'only GET is allowed'
        host = request.headers.get('Host', '')
        if _name_of(host) not in _LOOPBACK:
            return 'this page is served to 127.0.0.1 and localhost only'
        origin = request.headers.get('Origin')
        if origin is not None and origin != f'http://{host}':
            return 'requests of other pages are refused'
        opened = request.path == '/'  # any other page may open this one in a window
        site = request.headers.get('Sec-Fetch-Site', 'none')
        if site not in ('same-origin', 'none') and not (opened and request.headers.get('Sec-Fetch-Mode') == 'navigate'):
            return 'requests of other pages are refused'
        given = request.query.get('token', '') if opened else ''
        if not _same(given, self.token) and not _same(request.cookies.get(self._cookie, ''), self.token):
            return 'open the link that granular view has printed: it has the token of this page'
        return ''

    def admit(self, request: web.Request, response: web.StreamResponse) -> None:
        """Give the cookie to a browser that came with the token."""
        if _same(request.query.get('token', ''), self.token):
            response.set_cookie(self._cookie, self.token, httponly=True, samesite='Strict', path='/')


def _name_of(host: str) -> str:
    """Return the host name of a Host header; empty if it is not a host and perhaps a port."""
    try:
        parts = urlsplit(f'//{host}')
        parts.port  # noqa: B018 - raises for a port that is not a number
    except ValueError:
        return ''
    return '' if parts.path or parts.query or parts.fragment or '@' in host else parts.hostname or ''


def _same(given: str, token: str) -> bool:
    return hmac.compare_digest(given.encode(errors='surrogateescape'), token.encode())
