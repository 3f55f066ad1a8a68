"""Addresses of the web: the characters that are sent as they are, and those that are percent-encoded, as browsers do.

The key of a file on a web server is the path of its address, and its query. A path has one canonical form: a character
that must be encoded stands for itself, any other escape stays as it was given. So an address is sent as it was given,
and a name with a space is the same in both spellings.
"""

import re
import urllib.parse
from typing import Final

_IN_PATH: Final = re.compile(rb'[^!$&-;=@-Z\[\]_a-z~%]|%(?![0-9A-Fa-f]{2})')
_IN_QUERY: Final = re.compile(rb'[^!$-;=?-~]')
_PLAIN: Final = re.compile(r'[!$&-;=@-Z\[\]_a-z~]*')
_ESCAPES: Final = re.compile(r'(?:%[0-9A-F]{2})+')
_HOST: Final = re.compile(r'[^/?]*')
_KEPT: Final = frozenset('?%')  # must be encoded, and would have another meaning in a key


def encoded(key: str | bytes) -> str:
    """Return a path and its query as they are sent: escapes stay, and what HTTP or a browser does not send is encoded.

    Bytes are those of a header.
    """
    if isinstance(key, str):
        if _PLAIN.fullmatch(key):
            return key
        key = key.encode()
    path, mark, query = key.partition(b'?')
    return (_IN_PATH.sub(_escape, path) + mark + _IN_QUERY.sub(_escape, query)).decode()


def canonical(key: str) -> str:
    """Return the key of a path and its query as a user gives them, in which names are readable."""
    path, mark, query = encoded(key).partition('?')
    return _ESCAPES.sub(_readable, path) + mark + query


def split(address: str) -> tuple[str, str]:
    """Return the host of an address without its scheme, and its key."""
    host = _HOST.match(address)[0]  # type: ignore[index]
    path, mark, query = canonical(address[len(host) :]).partition('?')
    return host, path.removeprefix('/').rstrip('/') + mark + query


def named(path: str) -> str:
    """Return a path, or a part of one, without its query and without escapes: the names of files.

    Escapes that are not UTF-8 stay.
    """
    path = path.partition('?')[0]
    if '%' not in path:
        return path
    try:
        return urllib.parse.unquote(path, errors='strict')
    except UnicodeDecodeError:
        return path


def keyed(name: str) -> str:
    """Return the part of a key that stands for a name: its characters with another meaning in addresses are encoded.

    Some servers take a plus sign for a space.
    """
    return canonical(name.replace('%', '%25').replace('?', '%3F').replace('+', '%2B'))


def _escape(match: re.Match[bytes]) -> bytes:
    return b'%%%02X' % match[0][0]


def _readable(match: re.Match[str]) -> str:
    """Return a row of escapes with those replaced that the character itself is sent as."""
    try:
        characters = urllib.parse.unquote(match[0], errors='strict')
    except UnicodeDecodeError:
        return match[0]
    return ''.join(
        char
        if char.isprintable() and char not in _KEPT and _PLAIN.fullmatch(char) is None
        else ''.join(f'%{byte:02X}' for byte in char.encode())
        for char in characters
    )
