"""One byte range of an object on its way: which replies answer it, and going on where a broken one ended."""

import re
from typing import Final

import aiohttp

from granular.aio.reply import Reply, changed
from granular.config import MiB
from granular.errors import BadReplyError, OutOfRangeError

_CONTENT_RANGE: Final = re.compile(r'bytes (?:(\d+)-(\d+)|\*)/(\d+|\*)')
_WHOLE: Final = 64 * MiB  # of an object that a store sends whole although a range was asked for


class Download:
    """A byte range, over as many replies as it takes.

    Args:
      name: the object, for errors.
      start: the first byte, or, if negative, how many bytes of the object's end.
      stop: behind the last byte; None for all that follows.
      version: what the object's version must be; None for any, but then the same in every reply.
      version_header: the header that tells the version.
    """

    def __init__(self, name: str, start: int, stop: int | None, version: str | None, version_header: str) -> None:
        self._name, self._start, self._stop = name, start, stop
        self._version, self._header = version, version_header
        self._parts: list[bytes] = []
        self._got = 0
        self._span: tuple[int, int, int] | None = None  # first byte, behind the last, size; from the first reply

    @property
    def range(self) -> str:
        """The Range header that asks for what is still missing."""
        if self._span is not None:
            return f'bytes={self._span[0] + self._got}-{self._span[1] - 1}'
        if self._start < 0:
            return f'bytes={self._start}'
        return f'bytes={self._start}-{"" if self._stop is None else self._stop - 1}'

    async def take(self, response: aiohttp.ClientResponse) -> Reply | None:
        """Read a reply; None if its status says that it is no answer.

        Raises:
          BadReplyError: if it does not answer what was asked.
          ObjectChangedError: if it is of another version.
          OutOfRangeError: if the object ends before.
          aiohttp.ClientError, TimeoutError: if it breaks off; what came is kept, if the object has a version.
        """
        if response.status not in (200, 206, 416):
            return None
        version = response.headers.get(self._header)
        if self._version is not None and response.status != 416 and version != self._version:
            raise changed(self._name, self._version, version)
        try:
            match response.status:
                case 206:
                    return await self._part(response, version)
                case 200:
                    return await self._whole(response, version)
                case _:
                    return self._nothing(response)
        except BadReplyError:
            self._restart()  # nothing of what came can be relied on
            raise

    async def _part(self, response: aiohttp.ClientResponse, version: str | None) -> Reply:
        said = response.headers.get('Content-Range', '')
        match = _CONTENT_RANGE.fullmatch(said)
        if match is None or match[1] is None or match[3] == '*':
            raise BadReplyError(f'{self._name}: status 206 with Content-Range {said!r}')
        first, behind, size = int(match[1]), int(match[2]) + 1, int(match[3])
        if self._span is None:
            want = max(0, size + self._start) if self._start < 0 else self._start
            expected = (want, size if self._stop is None else min(self._stop, size), size)
        else:
            expected = (self._span[0] + self._got, *self._span[1:])
        if (first, behind, size) != expected:
            raise BadReplyError(f'{self._name}: {self.range} was answered with Content-Range {said!r}')
        if self._span is None:
            self._span = (first, behind, size)
        self._version = version
        await self._drain(response, behind - self._span[0])
        if self._got != behind - self._span[0]:
            raise BadReplyError(f'{self._name}: {self._got} bytes came instead of {behind - self._span[0]}')
        data = self._parts[0] if len(self._parts) == 1 else b''.join(self._parts)
        if self._stop is not None and behind < self._stop:
            raise self._beyond(size)
        return Reply(data, self._span[0], size, version)

    async def _whole(self, response: aiohttp.ClientResponse, version: str | None) -> Reply:
        """The store ignores ranges, or the object is empty: what was asked for is cut out."""
        encoding = response.headers.get('Content-Encoding', 'identity')
        length = response.content_length
        if encoding != 'identity':
            raise BadReplyError(
                f'{self._name}: the store sent all of it, with Content-Encoding {encoding}, in which there are no '
                f'ranges: store it without'
            )
        if length is not None and length > _WHOLE and self.range != 'bytes=0-':
            raise BadReplyError(f'{self._name}: {self.range} was answered with all of its {length} bytes')
        self._restart()
        enough = self._stop if self._start >= 0 and length is not None else None
        await self._drain(response, enough)
        data = b''.join(self._parts)
        size = len(data) if length is None else length
        if enough is None and len(data) != size:
            raise BadReplyError(f'{self._name}: {len(data)} bytes came instead of {size}')
        if self._stop is not None and size < self._stop:
            raise self._beyond(size)
        first = max(0, size + self._start) if self._start < 0 else min(self._start, size)
        return Reply(data[first : self._stop], first, size, version)

    def _nothing(self, response: aiohttp.ClientResponse) -> Reply:
        match = _CONTENT_RANGE.fullmatch(response.headers.get('Content-Range', ''))
        size = int(match[3]) if match is not None and match[3] != '*' else -1
        # Nothing can be the end of an empty object, so stores refuse to give it. S3 does not say its size.
        if size <= 0 and self._start <= 0 and self._stop is None:
            return Reply(b'', 0, 0, response.headers.get(self._header))
        if self._version is not None:
            # It was long enough when its version was learned.
            raise changed(self._name, self._version, response.headers.get(self._header))
        raise self._beyond(size)

    async def _drain(self, response: aiohttp.ClientResponse, enough: int | None) -> None:
        content = response.content
        try:
            while chunk := await content.readany():
                self._parts.append(chunk)
                self._got += len(chunk)
                if enough is not None and self._got >= enough:
                    if self._got > enough and response.status == 206:
                        raise BadReplyError(f'{self._name}: more than the {enough} bytes asked for came')
                    # Closes a reply that says more; one that is at its end gives its connection back.
                    return
        except (aiohttp.ClientError, TimeoutError, OSError):
            if self._version is None or response.status != 206:
                self._restart()  # what follows may be of another version
            raise

    def _restart(self) -> None:
        self._parts, self._got, self._span = [], 0, None

    def _beyond(self, size: int) -> OutOfRangeError:
        known = f'but it has {size}' if size >= 0 else 'which lie beyond its end'
        return OutOfRangeError(f'{self._name}: bytes {self._start} to {self._stop} were asked for, {known}')
