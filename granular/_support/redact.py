"""Redact credentials, presigned query values and secret store options from URLs and messages."""

import html
import re
import urllib.parse
from collections.abc import Iterable
from typing import Final

# Before the @ of Azure's addresses (abfs://container@account...) stands no user but the container. A password may
# contain unquoted slashes and more, so that it ends with the last @; what follows the port of a host is a path.
_HOST: Final = r'(?!arn:)(?!(?:[\w-]+(?:\.[\w-]+)+|localhost):\d{1,5}[/?#])'
_USER: Final = re.compile(
    r'(?!(?<=\babfs)://[\w$-]+@|(?<=\babfss)://[\w$-]+@|(?<=\baz)://[\w$-]+@)'
    rf'://(?:{_HOST}[^/?#\s@:\[]*:\S{{0,4096}}|[^/?#\s@]*)@'  # bounded, as a server may send many addresses
)
_UNQUOTED: Final = re.compile(r'\w+://(?!arn:)[^/?#\s@:\[]*:(?!\d{1,5}[/?#])[^/?#\[\]]*[/?#\[\]].*@.*', re.DOTALL)
_VALUE: Final = re.compile(r'([?&;][^=&;\s\'"<>]{1,64}=)[^&;\s\'"<>]*')
_HEADER: Final = re.compile(
    r'(\b(?:proxy-)?authorization|\b(?:set-)?cookie|\bx-amz-s(?:ecurity|3session)-token|\bx-goog-\w+-token)(["\']?\s*[:=]\s*)(?!\.\.\.)[^\r\n<]+',
    re.IGNORECASE,
)
_SCHEME: Final = re.compile(r'\b(bearer|basic|aws4-hmac-sha256)\s+[^\r\n<]+', re.IGNORECASE)
_LEAST: Final = 6  # minimum characters of a secret: shorter ones would match ordinary text
_WORD: Final = 8  # minimum characters of a word of a secret: shorter ones are ordinary words
_MOST: Final = 4096  # secrets remembered; the oldest are dropped
# Option values that are not secret: flags, kinds of GCS credentials, and authentication schemes.
_PLAIN: Final = frozenset(
    ('true', 'false', 'none', 'null', 'anon', 'cloud', 'cache', 'browser', 'google_default', 'bearer', 'basic')
)

_secrets: dict[str, None] = {}


def protect(secrets: Iterable[str]) -> None:
    """Make :func:`hidden` redact these values from now on, wherever they occur."""
    for secret in _variants(secrets):
        _secrets.setdefault(secret)
    for secret in list(_secrets)[:-_MOST]:
        _secrets.pop(secret, None)


def _variants(secrets: Iterable[str]) -> list[str]:
    """Return the values, their words (such as the token after ``Bearer``), and the quoted forms a server may use."""
    words = []
    for secret in secrets:
        words += [secret.strip(), *(word for word in secret.split() if len(word) >= _WORD)]
    quoted = [urllib.parse.quote(word, safe) for word in words for safe in ('', '/')]
    found = dict.fromkeys([*words, *quoted, *map(html.escape, words)])
    return [word for word in found if len(word) >= _LEAST and word.lower() not in _PLAIN]


def hidden(text: str) -> str:
    """Redact a URL, or a text that quotes a URL or request headers.

    Three dots replace the user and password of a URL, the value of each query parameter (such as a presigned
    signature), the value of each authorisation header, and each value passed to :func:`protect`.
    """
    if found := [secret for secret in list(_secrets) if secret in text]:
        found.sort(key=len, reverse=True)
        text = re.sub('|'.join(rf'(?<!\w){re.escape(secret)}(?!\w)' for secret in found), '...', text)
    text = _USER.sub('://...@', text)
    text = _VALUE.sub(r'\1...', text)
    text = _HEADER.sub(r'\1\2...', text)
    return _SCHEME.sub(r'\1 ...', text)


def is_quoted(url: str) -> bool:
    """Return False if a URL has a password with an unquoted slash, question mark, number sign or bracket."""
    return _UNQUOTED.fullmatch(url) is None


def without_user(text: str) -> str:
    """Remove users and passwords from the URLs in a text."""
    return _USER.sub('://', text)
