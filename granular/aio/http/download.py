"""Download of one byte range of an object: checks which replies answer it, and resumes where a broken one ended."""

import functools
import re
from collections.abc import Callable
from typing import Final, Protocol

from granular.aio.http.connection import SCRATCH, Exchange
from granular.aio.http.known_heads import KnownHeads
from granular.aio.http.messages import Head, shown
from granular.aio.http.reply import Reply, changed, stand_in, stands_in
from granular.aio.runtime.buffers import Space, blank
from granular.config import KiB, MiB
from granular.errors import BadReplyError, OutOfRangeError

_CONTENT_RANGE: Final = re.compile(r'bytes (?:(\d{1,18})-(\d{1,18})|\*)/(\d{1,18}|\*)')
# For the end of a shorter object, which then begins before the first byte, or of an empty one, which ends before it.
_TOO_LONG: Final = re.compile(r'bytes (-?\d{1,18})-(-?\d{1,18})/(\d{1,18})')
_WHOLE: Final = 64 * MiB  # of a whole object that is accepted in reply to a range request
_ENDLESS: Final = 1 << 62
_NOTHING: Final = blank(0)
_GROUND: Final = 64 * KiB  # an attempt that gains this, or an eighth of what was missing, is no failure
_STORED: Final = 'x-goog-stored-content-encoding'
_AS_IT_IS: Final = frozenset(('', 'identity', 'aws-chunked'))  # the last is an upload encoding that some stores keep


class Versions:
    """The versions that the objects of a store have, and the known heads of replies with these."""

    def __init__(self, header: str, required: bool) -> None:
        self.header = header.lower()  # contains the version
        self.required = required  # True if each object has a version: a whole body without one is not an object
        self.known_heads = KnownHeads(self.header)


class Batch(Protocol):
    """The interface of a batch that its downloads use."""

    def start(self, download: 'Download') -> None:
        """Send a download that has its slot. It does not raise."""

    def ended(self, download: 'Download', reply: Head | Exception | None) -> None:
        """Take the outcome of a download: None if it is complete, or a head to look at, or an error."""


class Download(Exchange):
    """A byte range, received over as many replies as it takes.

    Args:
      key: the object.
      named: returns the address of a key, by which errors name the object.
      start: the first byte, or, if negative, the number of bytes from the object's end.
      stop: the position after the last byte; None for the object's end.
      version: the version that the object must have; None for any, but then the same in every reply.
      into: the destination of the bytes; by default, newly allocated memory.
    """

    __slots__ = (
        '_done', '_enough', '_filling', '_held', '_into', '_named', '_range', '_size', '_space', '_span', '_start',
        '_stop', '_versions', 'batch', 'coding', 'data', 'has_slot', 'key', 'ranged', 'unproven', 'version', 'weight',
        'withdrawn',
    )  # fmt: skip

    def __init__(
        self,
        key: str,
        named: Callable[[str], str],
        start: int,
        stop: int | None,
        version: str | None,
        versions: Versions,
        into: Space | None = None,
    ) -> None:
        super().__init__()
        self.key = key
        self._named = named
        self._start = start
        self._stop = stop
        self._versions, self._into = versions, into
        self.version = version  # that was requested, or else that of the object, once a reply has come
        # Bytes of memory to reserve; a guess if the object's end is requested.
        self.weight = -start if start < 0 else MiB if stop is None else stop - start
        self.data = b''  # once they are complete; empty if they are in ``into``
        self.ranged = False  # True if the current request has a range
        self.coding = ''  # the Content-Encoding of the replies
        self.unproven = False  # True while it is unverified that the object is stored with it, or has the length
        self.batch: Batch | None = None  # that sends it, and is told how it ended; None for a coroutine's
        self.has_slot = False  # True if the batch has left its slot to a coroutine, which has not begun
        self.withdrawn = False  # True if the batch was cancelled while the download waited for its slot
        self._range = b''  # the expected range, as first-last
        self._size = 0  # of the object, by the expected head
        self._space = _NOTHING  # for the whole span
        self._done = 0  # bytes received by earlier replies
        self._held = 0  # bytes received at the last call of ``gained``
        self._filling = False  # True if the current reply contains bytes of the span, not an error text
        self._span: tuple[int, int, int] | None = None  # first byte, end, size of the object; from the first reply
        self._enough: int | None = None  # bytes after which a whole object contains the requested range

    @property
    def name(self) -> str:
        """The address of the object, for errors."""
        return self._named(self.key)

    def __str__(self) -> str:
        return self.name

    # --- the plain case: one request, and the one reply that is expected

    def plain_request(self) -> bytes:
        """Return the lines that complete the request; none if its reply cannot be told by range and version alone."""
        start, stop = self._start, self._stop
        if self.version is None or stop is None or not 0 <= start < stop:
            return b''
        self.ranged, self.large = True, self.weight > SCRATCH // 2
        self._range = b'%d-%d' % (start, stop - 1)
        return b'Range: bytes=%b\r\n\r\n' % self._range

    def end_plain(self) -> None:
        """Let a coroutine continue the download in its slot: from now on, each reply is parsed and awaited."""
        self.batch = None
        self._range = b''
        self.has_slot = True

    def expects(self, head: bytes) -> int:
        """Return the length of the body if a head is that of status 206 with the range and version requested.

        Anything else, such as an unknown head, or the whole object, which has a checksum, is left to the
        parser and to ``place``.
        """
        if not self._range or (facts := self._versions.known_heads.match(head)) is None:
            return -1
        range_, size, length, version = facts
        start, stop, total = self._start, self._stop, int(size)
        if (
            range_ != self._range
            or version != self.version.encode('latin-1', 'backslashreplace')  # type: ignore[union-attr]
            or int(length) != stop - start  # type: ignore[operator]
            or not stop - start < total >= stop  # type: ignore[operator]
        ):
            return -1
        self._size = total
        return stop - start  # type: ignore[operator]

    def parsed(self, raw: bytes, head: Head) -> None:
        if self._range:
            self._versions.known_heads.learn(raw, head)

    def allocate(self, length: int) -> memoryview:
        return self._room(self._start, self._start + length, self._size, self.version)

    def filled(self, body: memoryview) -> None:
        if self._into is None:
            self.data = bytes(body)
        else:
            self._into.view[:] = body

    def succeeded(self, head: Head | None) -> None:
        if self.batch is None:
            super().succeeded(head)
            return
        if head is None and self._span is not None and self._into is None:
            self.data = self._space.owner
        self.batch.ended(self, head)

    def failed(self, error: Exception) -> None:
        if self.batch is None:
            super().failed(error)
        else:
            self.batch.ended(self, error)

    def admitted(self) -> None:
        self.batch.start(self)  # type: ignore[union-attr]

    # --- any reply

    @property
    def whole(self) -> bool:
        return self._start == 0 and self._stop is None

    def range(self) -> str:
        """Return the header line that requests the missing bytes; empty for a whole object."""
        self.ranged = True
        if self._span is not None and self.version is None:
            self.restart()  # the rest may be of another version
        self._done += self.got if self._filling else 0
        self._filling, self.got = False, 0
        if self._span is not None and self._span[0] + self._done < self._span[1]:
            return f'Range: bytes={self._span[0] + self._done}-{self._span[1] - 1}\r\n'
        if self.whole:
            return self.everything()  # stores send the checksum of a whole object only without a range
        self.restart()
        if self._start < 0:
            return f'Range: bytes={self._start}\r\n'
        return f'Range: bytes={self._start}-{"" if self._stop is None else self._stop - 1}\r\n'

    def everything(self) -> str:
        """Like ``range``, but request the whole object in any case."""
        self.restart()
        self.ranged = False
        return ''

    def place(self, head: Head) -> memoryview | int:
        """Return the destination for the body of a reply, which must answer the request and be of its version."""
        if head.status not in (200, 206):
            return super().place(head)
        version = self._version_in(head)
        if version is None and (self.version is not None or (self._versions.required and head.status == 200)):
            # The reply is not from the store, such as an error page with a success status.
            header = self._versions.header
            raise BadReplyError(f'{self.name}: status {head.status} without {header}, which objects have')
        sized = head.status != 200 or head.length is not None or not stands_in(version)  # otherwise ``_cut`` compares
        if sized and self.version is not None and version != self.version:
            raise changed(self.name, self.version, version)
        if self.is_doubtful(head):
            return super().place(head)
        self.unproven = False
        coded = self.coding or 'content-encoding' in head.headers or _STORED in head.headers
        coding = self._coding(head) if coded else ''
        return self._part(head, version, coding) if head.status == 206 else self._all(head, version, coding)

    def _coding(self, head: Head) -> str:
        """Return a reply's coding, which must be the object's, as none was requested; empty if there is none."""
        coding = coding_of(head.headers.get('content-encoding', ''))
        stored = head.headers.get(_STORED)
        if stored is not None and coding_of(stored) != coding:
            raise BadReplyError(
                f'{self.name}: Content-Encoding {shown(coding)} of an object that is stored with {shown(stored)}'
            )
        if self._span is not None and coding != self.coding:
            # The bytes received before may not belong to this body.
            raise BadReplyError(f'{self.name}: Content-Encoding {shown(coding)} after {shown(self.coding)}')
        self.coding, self.unproven = coding, bool(coding) and stored is None
        return coding

    def take(self, head: Head) -> Reply | None:
        """Return the result at the end of a reply; None for any status except 200, 206 and 416.

        Raise ``OutOfRangeError`` if the object ends before the requested range does.
        """
        version = self._version_in(head)
        match head.status:
            case 200 | 206 if self._span is not None:
                first, behind, size = self._span
                if self._stop is not None and behind < self._stop:
                    raise self._beyond(size)
                data = b'' if self._into is not None else self._space.owner
                return _reply(data, first, size, version, head)
            case 200:
                return self._cut(head)
            case 416:
                return self._nothing(head, version)
        return None

    def _version_in(self, head: Head, received: int | None = None) -> str | None:
        """Return the object's version. For a web server without ETags: its modification time and size, which may be
        known only once all is ``received``.
        """
        version = head.headers.get(self._versions.header) or None
        if version is None and not self._versions.required and (modified := head.headers.get('last-modified')):
            size = received if head.length is None else head.length
            return stand_in(size if head.status == 200 else _size_in(head, refused=False), modified)
        return version

    def _part(self, head: Head, version: str | None, coding: str) -> memoryview:
        content_range = head.headers.get('content-range', '')
        if not self.ranged:
            raise BadReplyError(f'{self.name}: status 206 where no range was asked for')
        if self._is_all(content_range, head.length):
            return self._room(0, head.length or 0, head.length or 0, version)
        match = _CONTENT_RANGE.fullmatch(content_range)
        if match is None or match[1] is None or match[3] == '*':
            raise BadReplyError(f'{self.name}: status 206 with Content-Range {shown(content_range)}')
        first, behind, size = int(match[1]), int(match[2]) + 1, int(match[3])
        if self._span is None:
            want = max(0, size + self._start) if self._start < 0 else self._start
            expected = (want, size if self._stop is None else min(self._stop, size), size)
        else:
            expected = (self._span[0] + self._done, *self._span[1:])
        if (first, behind, size) != expected or behind <= first:
            raise BadReplyError(
                f'{self.name}: bytes {expected[0]} to {expected[1]} came as Content-Range {shown(content_range)}'
            )
        if head.length not in (None, behind - first):
            raise BadReplyError(f'{self.name}: Content-Range {shown(content_range)} with Content-Length {head.length}')
        if head.length is None and coding:
            # An object that is stored compressed has a length: this body was compressed in transit.
            raise BadReplyError(
                f'{self.name}: Content-Range {shown(content_range)} with Content-Encoding {shown(coding)}'
            )
        return self._room(first, behind, size, version)

    def _is_all(self, content_range: str, length: int | None) -> bool:
        """Return whether a reply to a request for more than all bytes has all of them, by three figures that agree."""
        match = _TOO_LONG.fullmatch(content_range) if self._stop is None and self._span is None else None
        if match is None:
            return False
        size = int(match[3])
        more = self._start <= -size and int(match[1]) in (0, size + self._start)
        return more and (int(match[2]), length) == (size - 1, size)

    def _room(self, first: int, behind: int, size: int, version: str | None) -> memoryview:
        """Return the destination for the following bytes; the first reply allocates it."""
        if self._span is None:
            self._span = (first, behind, size)
            wanted = behind - first
            self._space = blank(wanted, self) if self._into is None else self._into.part(0, wanted)
        self.version, self._filling = version, True
        return self._space.view[self._done :]

    def _all(self, head: Head, version: str | None, coding: str) -> memoryview | int:
        """Receive a whole object: as requested, or because the store ignores ranges; then the rest is cut off."""
        length = head.length
        if coding and (length is None or not self.whole):
            raise BadReplyError(
                f'{self.name}: the store sent all of it, with Content-Encoding {shown(coding)}, in which there are no '
                f'ranges: store it without'
            )
        if length is None and 'transfer-encoding' not in head.headers and (self._versions.required or not self.whole):
            # The body ends with the connection, so a truncated one could not be recognised.
            raise BadReplyError(f'{self.name}: status {head.status} without a length, by which to tell its end')
        if length is not None and self.whole:
            self.restart()
            return self._room(0, length, length, version)
        if length is not None and length > _WHOLE:
            raise BadReplyError(f'{self.name}: a range was answered with all of its {length} bytes')
        self.restart()
        self._enough = self._stop if self._start >= 0 and length is not None else None
        if self._enough is not None:
            return self._enough
        self.unproven = length is None and self._stop is None
        return _ENDLESS if self.whole else _WHOLE + 1

    def _cut(self, head: Head) -> Reply:
        data, length = bytes(self.collected), head.length
        self.collected.clear()
        size = len(data) if length is None else length
        if size > _WHOLE and not self.whole:
            raise BadReplyError(f'{self.name}: a range was answered with all of its object, of no length')
        version = self._version_in(head, size)
        if self.version is not None and version != self.version:
            raise changed(self.name, self.version, version)
        if self._enough is None and len(data) != size:
            raise BadReplyError(f'{self.name}: {len(data)} bytes came instead of {size}')
        if size < (self._start + (self._start > 0) if self._stop is None else self._stop):
            raise self._beyond(size)
        first = max(0, size + self._start) if self._start < 0 else self._start
        data = data[first : self._stop]
        if self._into is not None:
            self._into.view[:] = data
        return _reply(data, first, size, version, head)

    def is_doubtful(self, head: Head) -> bool:
        """Return whether a reply suggests that an object is empty without saying so: only reading all of it will tell.

        Stores refuse the end of an empty object with status 416, or send no bytes.
        """
        if self._start >= 0 or self.version is not None or not self.ranged:
            return False
        return (head.status == 206 and head.length == 0) or (head.status == 416 and _size_in(head) < 0)

    def _nothing(self, head: Head, version: str | None) -> Reply:
        size = _size_in(head)
        # An empty object has no last bytes, so stores refuse the request.
        if size == 0 and self._start <= 0 and self._stop is None and self.ranged:
            return Reply(b'', 0, 0, version)
        if self.whole or not self.ranged:
            raise BadReplyError(f'{self.name}: status 416 where no range was asked for')
        if self.version is not None:
            if version == self.version:
                stop = 'its end' if self._stop is None else self._stop
                raise BadReplyError(
                    f'{self.name}: status 416 for bytes {self._start} to {stop} of version {shown(version)}, '
                    f'which has them'
                )
            # The object was long enough when its version was read.
            raise changed(self.name, self.version, version)
        raise self._beyond(size)

    def restart(self) -> None:
        self._space = _NOTHING
        self._span = None
        self._done = 0
        self.got = 0
        self._filling = False
        self._held = 0

    def gained(self) -> int:
        """Return the bytes gained since the last call; 0 if they are too few of the missing ones to be progress."""
        if self._span is None or self.version is None:
            return 0
        held = self._done + (self.got if self._filling else 0)
        gained, missing, self._held = held - self._held, self._span[1] - self._span[0] - self._held, held
        return gained if gained >= min(_GROUND, missing / 8) else 0

    def content(self, reply: Reply) -> bytes | memoryview:
        """Return the bytes of a reply, wherever they were received."""
        return reply.data if self._into is None else self._into.view

    def _beyond(self, size: int) -> OutOfRangeError:
        actual = f'but it has {size}' if size >= 0 else 'which lie beyond its end'
        return OutOfRangeError(f'{self.name}: bytes {self._start} to {self._stop} were requested, {actual}')


def _reply(data: bytes, start: int, size: int, version: str | None, head: Head) -> Reply:
    return Reply(data, start, size, version, head.headers.get('last-modified', ''), head.headers.get('date', ''))


def _size_in(head: Head, refused: bool = True) -> int:
    """Return an object's size from the Content-Range of a reply, which has no range if it was refused; or -1."""
    match = _CONTENT_RANGE.fullmatch(head.headers.get('content-range', ''))
    return int(match[3]) if match is not None and match[3] != '*' and not (refused and match[1]) else -1


@functools.lru_cache(64)
def coding_of(text: str) -> str:
    """Return a Content-Encoding without the tokens that change nothing; empty if none is left."""
    return ','.join(token for token in re.split(r'[\s,]+', text.lower()) if token not in _AS_IT_IS)
