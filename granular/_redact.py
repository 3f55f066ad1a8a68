"""Redact credentials, presigned query values and the secret options of stores from addresses and messages."""

import functools
import html
import re
import urllib.parse
from collections.abc import Iterable
from typing import Final

_USER: Final = re.compile(r'://[^/?#\s@]*@')
_VALUE: Final = re.compile(r'([?&;][^=&;\s\'"<>]{1,64}=)[^&;\s\'"<>]*')
_HEADER: Final = re.compile(
    r'(\b(?:proxy-)?authorization|\b(?:set-)?cookie|\bx-amz-security-token|\bx-goog-\w+-token)(["\']?\s*[:=]\s*)(?!\.\.\.)[^\r\n<]+',
    re.IGNORECASE,
)
_SCHEME: Final = re.compile(r'\b(bearer|basic|aws4-hmac-sha256)\s+[^\r\n<]+', re.IGNORECASE)
_LEAST: Final = 4  # characters of a secret: fewer are found in any text
_WORD: Final = 8  # characters of a word of a secret, which else would be any word
_MOST: Final = 4096  # secrets that are remembered
# Values that are no secret: of flags, kinds of credentials of GCS, and schemes before a credential.
_PLAIN: Final = frozenset(
    ('true', 'false', 'none', 'null', 'anon', 'cloud', 'cache', 'browser', 'google_default', 'bearer', 'basic')
)

_secrets: dict[str, None] = {}


def protect(secrets: Iterable[str]) -> None:
    """Have :func:`hidden` redact these values from now on, whatever text quotes them."""
    new = [secret for secret in _variants(secrets) if secret not in _secrets]
    for secret in new:
        while len(_secrets) >= _MOST:
            del _secrets[next(iter(_secrets))]
        _secrets[secret] = None
    if new:
        _pattern.cache_clear()


def redact(text: str, secrets: Iterable[str]) -> str:
    """A text with three dots for each of some values, also where they are quoted for an address or a page."""
    return _alternatives(_variants(secrets)).sub('...', text)


def _variants(secrets: Iterable[str]) -> list[str]:
    """The values, their words, such as the token behind ``Bearer``, and how a server may quote them."""
    words = []
    for secret in secrets:
        words += [secret.strip(), *(word for word in secret.split() if len(word) >= _WORD)]
    quoted = [urllib.parse.quote(word, safe='') for word in words] + [html.escape(word) for word in words]
    found = dict.fromkeys(words + quoted)
    return [word for word in found if len(word) >= _LEAST and word.lower() not in _PLAIN]


def _alternatives(words: Iterable[str]) -> re.Pattern[str]:
    longest_first = sorted(words, key=len, reverse=True)
    return re.compile('|'.join(rf'(?<!\w){re.escape(word)}(?!\w)' for word in longest_first) or r'(?!)')


@functools.cache
def _pattern() -> re.Pattern[str]:
    return _alternatives(_secrets)


def hidden(text: str) -> str:
    """An address, or a text that quotes one or the headers of a request, with three dots for what is not to be shown.

    That is the user and password of an address, the value of each parameter of a query, such as the signature of a
    presigned one, the value of each header that authorises, and each value that was given to :func:`protect`.
    """
    text = _pattern().sub('...', text)
    text = _USER.sub('://...@', text)
    text = _VALUE.sub(r'\1...', text)
    text = _HEADER.sub(r'\1\2...', text)
    return _SCHEME.sub(r'\1 ...', text)


def without_user(text: str) -> str:
    """A text without the users and passwords of addresses."""
    return _USER.sub('://', text)
