"""What of an address or a text of others may be shown: not who it lets in, and not what a query may have signed."""

import re
from typing import Final

_USER: Final = re.compile(r'://[^/?#\s@]*@')
_VALUE: Final = re.compile(r'([?&;][^=&;\s\'"<>]{1,64}=)[^&;\s\'"<>]*')
_HEADER: Final = re.compile(
    r'(\b(?:proxy-)?authorization|\b(?:set-)?cookie|\bx-amz-security-token|\bx-goog-\w+-token)(["\']?\s*[:=]\s*)(?!\.\.\.)[^\r\n<]+',
    re.IGNORECASE,
)
_SCHEME: Final = re.compile(r'\b(bearer|basic|aws4-hmac-sha256)\s+[^\r\n<]+', re.IGNORECASE)


def hidden(text: str) -> str:
    """An address, or a text that quotes one or the headers of a request, with three dots for what is not to be shown.

    That is the user and password of an address, the value of each parameter of a query, such as the signature of a
    presigned one, and the value of each header that authorises.
    """
    text = _USER.sub('://...@', text)
    text = _VALUE.sub(r'\1...', text)
    text = _HEADER.sub(r'\1\2...', text)
    return _SCHEME.sub(r'\1 ...', text)


def without_user(text: str) -> str:
    """A text without the users and passwords of addresses."""
    return _USER.sub('://', text)
