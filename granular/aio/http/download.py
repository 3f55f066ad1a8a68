"""One byte range of an object on its way: which replies answer it, and going on where a broken one ended."""

import functools
import re
from typing import Final

from granular.aio.http.buffers import Space, blank
from granular.aio.http.connection import Sink
from granular.aio.http.messages import Head, shown
from granular.aio.http.reply import Reply, changed, stand_in
from granular.config import KiB, MiB
from granular.errors import BadReplyError, OutOfRangeError, StoreError

_CONTENT_RANGE: Final = re.compile(r'bytes (?:(\d{1,18})-(\d{1,18})|\*)/(\d{1,18}|\*)')
_OF_NOTHING: Final = 'bytes 0--1/0'  # fake-gcs-server's word for an empty object, which has no range to name
_WHOLE: Final = 64 * MiB  # of an object that a store sends whole although a range was asked for
_ENDLESS: Final = 1 << 62
_NOTHING: Final = blank(0)
_GROUND: Final = 64 * KiB  # that an attempt must gain, or an eighth of what was missing, to be no failure
_STORED: Final = 'x-goog-stored-content-encoding'
_AS_IT_IS: Final = frozenset(('', 'identity', 'aws-chunked'))  # the last is a way of uploading that some stores keep


class Download(Sink):
    """A byte range, over as many replies as it takes.

    Args:
      name: the object, for errors.
      start: the first byte, or, if negative, how many bytes of the object's end.
      stop: behind the last byte; None for all that follows.
      version: what the object's version must be; None for any, but then the same in every reply.
      version_header: the header that tells the version, in lower case.
      into: where the bytes go; by default into bytes of their own.
      versioned: whether each object has a version, so that what comes whole and without one is no object.
    """

    ranged = False
    """Whether the present request has a range."""
    coding = ''
    """The Content-Encoding of the replies."""
    unproven = False
    """Whether it is to be seen that the object is stored with that coding, or has the length that came."""
    _held = 0  # bytes that had come when that was last asked

    def __init__(
        self,
        name: str,
        start: int,
        stop: int | None,
        version: str | None,
        version_header: str,
        into: Space | None,
        versioned: bool,
    ) -> None:
        self._name, self._start, self._stop = name, start, stop
        self._version, self._header = version, version_header
        self._into, self._versioned = into, versioned
        self._space = _NOTHING  # for all of the span
        self._done = 0  # bytes that earlier replies brought
        self._filling = False  # whether the present reply brings bytes of the span, and not the text of an error
        self._span: tuple[int, int, int] | None = None  # first byte, behind the last, size; from the first reply
        self._enough: int | None = None  # bytes after which a whole object has what was asked for

    @property
    def whole(self) -> bool:
        """Whether all of an object is wanted."""
        return self._start == 0 and self._stop is None

    def range(self) -> str:
        """The header line that asks for what is still missing; none for all of an object."""
        self.ranged = True
        if self._span is not None and self._version is None:
            self.restart()  # what follows may be of another version
        self._done += self.got if self._filling else 0
        self._filling, self.got = False, 0
        if self._span is not None and self._span[0] + self._done < self._span[1]:
            return f'Range: bytes={self._span[0] + self._done}-{self._span[1] - 1}\r\n'
        self.restart()
        if self.whole:
            self.ranged = False
            return ''  # stores tell the checksum of what is asked for without a range
        if self._start < 0:
            return f'Range: bytes={self._start}\r\n'
        return f'Range: bytes={self._start}-{"" if self._stop is None else self._stop - 1}\r\n'

    def everything(self) -> str:
        """As ``range``, for all of an object whatever was asked for."""
        self.restart()
        self.ranged = False
        return ''

    def place(self, head: Head) -> memoryview | int:
        """Where the body of a reply goes.

        Raises:
          BadReplyError: if it does not answer what was asked.
          ObjectChangedError: if it is of another version.
        """
        if head.status not in (200, 206):
            return super().place(head)
        version = self._version_in(head)
        if version is None and (self._version is not None or (self._versioned and head.status == 200)):
            # A page of somebody else's, such as an error in a reply of success.
            raise BadReplyError(f'{self._name}: status {head.status} without {self._header}, which objects have')
        if self._version is not None and version != self._version:
            raise changed(self._name, self._version, version)
        if self.is_doubtful(head):
            return super().place(head)
        self.unproven = False
        coded = self.coding or 'content-encoding' in head.headers or _STORED in head.headers
        coding = self._coding(head) if coded else ''
        return self._part(head, version, coding) if head.status == 206 else self._all(head, version, coding)

    def _coding(self, head: Head) -> str:
        """The coding of a reply, which must be that of the object, as none was asked for; empty if there is none."""
        coding = coding_of(head.headers.get('content-encoding', ''))
        stored = head.headers.get(_STORED)
        if stored is not None and coding_of(stored) != coding:
            raise BadReplyError(
                f'{self._name}: Content-Encoding {shown(coding)} of an object that is stored with {shown(stored)}'
            )
        if self._span is not None and coding != self.coding:
            # What came before may be no part of this.
            raise BadReplyError(f'{self._name}: Content-Encoding {shown(coding)} after {shown(self.coding)}')
        self.coding, self.unproven = coding, bool(coding) and stored is None
        return coding

    def take(self, head: Head) -> Reply | None:
        """What came, at the end of a reply; None if its status says that it is no answer.

        Raises:
          BadReplyError: if it is not what was asked for.
          OutOfRangeError: if the object ends before.
        """
        version = self._version_in(head)
        match head.status:
            case 200 | 206 if self._span is not None:
                first, behind, size = self._span
                if self._stop is not None and behind < self._stop:
                    raise self._beyond(size)
                data = b'' if self._into is not None else self._space.owner
                said = head.headers.get
                return Reply(data, first, size, version, said('last-modified', ''), said('date', ''))
            case 200:
                return self._cut(head, version)
            case 416:
                return self._nothing(head, version)
        return None

    def _version_in(self, head: Head) -> str | None:
        """The object's version. For a web server without ETags, the time of its last change and its size."""
        version = head.headers.get(self._header) or None
        if version is None and not self._versioned and (modified := head.headers.get('last-modified')):
            return stand_in(head.length if head.status == 200 else _total_in(head), modified)
        return version

    def _part(self, head: Head, version: str | None, coding: str) -> memoryview:
        said = head.headers.get('content-range', '')
        if not self.ranged:
            raise BadReplyError(f'{self._name}: status 206 where no range was asked for')
        if said == _OF_NOTHING and head.length == 0 and self._start <= 0 and self._stop is None and self._span is None:
            return self._room(0, 0, 0, version)
        match = _CONTENT_RANGE.fullmatch(said)
        if match is None or match[1] is None or match[3] == '*':
            raise BadReplyError(f'{self._name}: status 206 with Content-Range {shown(said)}')
        first, behind, size = int(match[1]), int(match[2]) + 1, int(match[3])
        if self._span is None:
            want = max(0, size + self._start) if self._start < 0 else self._start
            expected = (want, size if self._stop is None else min(self._stop, size), size)
        else:
            expected = (self._span[0] + self._done, *self._span[1:])
        if (first, behind, size) != expected or behind <= first:
            raise BadReplyError(
                f'{self._name}: bytes {expected[0]} to {expected[1]} came as Content-Range {shown(said)}'
            )
        if head.length not in (None, behind - first):
            raise BadReplyError(f'{self._name}: Content-Range {shown(said)} with Content-Length {head.length}')
        if head.length is None and coding:
            # What is stored compressed has a length: this was compressed on its way.
            raise BadReplyError(f'{self._name}: Content-Range {shown(said)} with Content-Encoding {shown(coding)}')
        return self._room(first, behind, size, version)

    def _room(self, first: int, behind: int, size: int, version: str | None) -> memoryview:
        """Where what follows goes."""
        if self._span is None:
            self._span = (first, behind, size)
            try:
                self._space = blank(behind - first) if self._into is None else self._into.part(0, behind - first)
            except StoreError as error:
                raise StoreError(f'{self._name}: {error}') from error
        self._version, self._filling = version, True
        return self._space.view[self._done :]

    def _all(self, head: Head, version: str | None, coding: str) -> memoryview | int:
        """All of an object, because it was asked for, or because the store ignores ranges: then the rest is cut off."""
        length = head.length
        if coding and (length is None or not self.whole):
            raise BadReplyError(
                f'{self._name}: the store sent all of it, with Content-Encoding {shown(coding)}, in which there are no '
                f'ranges: store it without'
            )
        if length is None and 'transfer-encoding' not in head.headers and (self._versioned or not self.whole):
            # It ends with the connection, wherever that breaks.
            raise BadReplyError(f'{self._name}: status {head.status} without a length, by which to tell its end')
        if length is not None and self.whole:
            self.restart()
            return self._room(0, length, length, version)
        if length is not None and length > _WHOLE:
            raise BadReplyError(f'{self._name}: a range was answered with all of its {length} bytes')
        self.restart()
        self._enough = self._stop if self._start >= 0 and length is not None else None
        if self._enough is not None:
            return self._enough
        self.unproven = length is None and self._stop is None
        return _ENDLESS if self.whole else _WHOLE + 1

    def _cut(self, head: Head, version: str | None) -> Reply:
        data, self.body, length = bytes(self.body), bytearray(), head.length
        size = len(data) if length is None else length
        if size > _WHOLE and not self.whole:
            raise BadReplyError(f'{self._name}: a range was answered with all of its object, of no length')
        if self._enough is None and len(data) != size:
            raise BadReplyError(f'{self._name}: {len(data)} bytes came instead of {size}')
        if self._stop is not None and size < self._stop:
            raise self._beyond(size)
        first = max(0, size + self._start) if self._start < 0 else min(self._start, size)
        data = data[first : self._stop]
        if self._into is not None:
            self._into.view[:] = data
        said = head.headers.get
        return Reply(data, first, size, version, said('last-modified', ''), said('date', ''))

    def is_doubtful(self, head: Head) -> bool:
        """Whether a reply suggests that an object is empty without saying so: only all of the object will tell.

        Stores refuse the end of an empty object with status 416, and fake-gcs-server gives none of its bytes.
        """
        if self._start >= 0 or self._version is not None or not self.ranged:
            return False
        none = head.status == 206 and head.length == 0 and head.headers.get('content-range') == 'bytes 0--1/0'
        return none or (head.status == 416 and _size_in(head) < 0)

    def _nothing(self, head: Head, version: str | None) -> Reply:
        size = _size_in(head)
        # Nothing can be the end of an empty object, so stores refuse to give it.
        if size == 0 and self._start <= 0 and self._stop is None and self.ranged:
            return Reply(b'', 0, 0, version)
        if self.whole or not self.ranged:
            raise BadReplyError(f'{self._name}: status 416 where no range was asked for')
        if self._version is not None:
            # It was long enough when its version was learned.
            raise changed(self._name, self._version, version)
        raise self._beyond(size)

    def restart(self) -> None:
        """Forget what came."""
        self._space, self._span, self._done, self.got, self._filling = _NOTHING, None, 0, 0, False
        self._held = 0

    def gained(self) -> int:
        """The bytes that were gained since this was last asked, if they are ground: not if they are but few of many."""
        if self._span is None or self._version is None:
            return 0
        held = self._done + (self.got if self._filling else 0)
        gained, missing, self._held = held - self._held, self._span[1] - self._span[0] - self._held, held
        return gained if gained and gained >= min(_GROUND, missing / 8) else 0

    def content(self, reply: Reply) -> bytes | memoryview:
        """The bytes of a reply, wherever they went."""
        return reply.data if self._into is None else self._into.view

    def _beyond(self, size: int) -> OutOfRangeError:
        known = f'but it has {size}' if size >= 0 else 'which lie beyond its end'
        return OutOfRangeError(f'{self._name}: bytes {self._start} to {self._stop} were asked for, {known}')


def _total_in(head: Head) -> int:
    """An object's size, if the Content-Range of a reply says it, else -1."""
    match = _CONTENT_RANGE.fullmatch(head.headers.get('content-range', ''))
    return int(match[3]) if match is not None and match[3] != '*' else -1


def _size_in(head: Head) -> int:
    """An object's size, if a refusal of its range says it, else -1."""
    match = _CONTENT_RANGE.fullmatch(head.headers.get('content-range', ''))
    return int(match[3]) if match is not None and match[1] is None and match[3] != '*' else -1


@functools.lru_cache(64)
def coding_of(text: str) -> str:
    """A Content-Encoding without what changes nothing; empty if nothing is left."""
    return ','.join(token for token in re.split(r'[\s,]+', text.lower()) if token not in _AS_IT_IS)
