"""Known heads of replies: a head with the same headers as an earlier one is read by one regular expression.

A server sends the same headers, in the same order, with each range of an object, and parsing them one by one takes
longer than receiving a small record. A pattern is made from a head that the full parser accepted: the lines that decide
how the body is read must be the same, the length, range and version are extracted, and other values may be any. So a
head that matches would be accepted by the full parser with the same result; any other is left to it.
"""

import re
from typing import Final, NamedTuple

from granular.aio.http.messages import Head

_MOST: Final = 16  # patterns for one store: a server that varies its headers more is parsed in full
_ANY: Final = rb'.*'  # but for a line feed; ``match`` looks for the other characters that no value may have
_RANGE: Final = rb'bytes (?P<range>\d{1,18}-\d{1,18})/(?P<size>\d{1,18})'
_LENGTH: Final = rb'(?P<length>\d{1,18})'
_VERSION: Final = rb'(?P<version>.*)'
_FACTS: Final = ('range', 'size', 'length', 'version')


class _Known(NamedTuple):
    pattern: re.Pattern[bytes]
    facts: tuple[int, ...]  # the groups of ``_FACTS``
    lines: int


class KnownHeads:
    """The heads of the replies to range reads from one store."""

    def __init__(self, version_header: str) -> None:
        self._version_header = version_header  # in lower case
        self._known: list[_Known] = []

    def match(self, head: bytes) -> tuple[bytes, ...] | None:
        """Return the range (``first-last``), object size, body length and version in a known head, else None.

        The head goes up to the end of its last line, here as in ``learn``.
        """
        for pattern, facts, lines in self._known:
            match = pattern.fullmatch(head)
            if match is not None and head.count(b'\r') == lines and 0 not in head:
                return match.group(*facts)
        return None

    def learn(self, raw: bytes, head: Head) -> None:
        """Add a head that the full parser accepted, if replies like it need nothing else."""
        status, *lines = raw[:-2].split(b'\r\n')
        if len(self._known) >= _MOST or len(lines) != len(head.headers) or not self._is_simple(head):
            return
        pattern = re.compile(b''.join([re.escape(status + b'\r\n'), *map(self._line, lines)]))
        if pattern.fullmatch(raw) is not None:  # not with unusual spaces
            facts = tuple(pattern.groupindex[name] for name in _FACTS)
            self._known.append(_Known(pattern, facts, 1 + len(lines)))

    def _is_simple(self, head: Head) -> bool:
        """Return whether a reply is a range of a larger object that keeps its version, coding and connection."""
        headers = head.headers
        return (
            head.status == 206
            and head.length is not None
            and {'content-range', self._version_header} <= headers.keys()
            and 'content-encoding' not in headers
            and 'close' not in headers.get('connection', '').lower()
        )

    def _line(self, line: bytes) -> bytes:
        name = line.partition(b':')[0].lower().decode('latin-1')
        fixed = re.escape(line)
        if name in ('content-range', 'content-length', self._version_header):
            value = {'content-range': _RANGE, 'content-length': _LENGTH}.get(name, _VERSION)
            fixed = re.escape(line[: len(name)]) + b': ' + value
        elif name != 'connection' and not name.endswith('-encoding'):
            fixed = re.escape(line[: len(name) + 1]) + _ANY
        return fixed + rb'\r\n'
