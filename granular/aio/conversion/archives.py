"""Unpack zip and tar archives while they are downloaded, into one folder.

A tar is read once, from its beginning. A zip has its directory at the end, which is read first, by range requests
(https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT, 4.3; POSIX.1-2017, pax, for tar). Archives are untrusted:
no member is written outside of the folder, or through a link, and none may exceed its declared size.
"""

import asyncio
import concurrent.futures
import os
from typing import Final, NamedTuple

from granular.aio.http.digests import Digests, proven
from granular.aio.paths.file import Progress
from granular.aio.paths.path import Path
from granular.aio.paths.seekable import SeekableFile
from granular.aio.runtime.pools import Threads
from granular.aio.runtime.tasks import result_of
from granular.aio.runtime.threads import call_in
from granular.aio.runtime.user_functions import call_user
from granular.config import MiB
from granular.errors import CorruptArchiveError, GranularError

KINDS: Final = {
    '.zip': 'zip', '.tar': 'tar', '.tar.gz': 'tar.gz', '.tgz': 'tar.gz', '.tar.bz2': 'tar.bz2', '.tar.xz': 'tar.xz',
    '.tar.zst': 'tar.zst',
}  # fmt: skip
"""The suffixes of archive names, and their formats."""

_WINDOW: Final = 8 * MiB


class Unpacked(NamedTuple):
    """The number and the bytes of the unpacked files."""

    files: int
    bytes: int


def split_name(name: str) -> tuple[str, str]:
    """Return a file name without its archive suffix, and the format; the name and an empty string if it has none."""
    for ending, kind in KINDS.items():
        if name.lower().endswith(ending) and len(name) > len(ending):
            return name[: -len(ending)], kind
    return name, ''


async def unpack(
    source: Path, kind: str, folder: str, pool: Threads, progress: Progress | None = None, keep: str = ''
) -> Unpacked:
    """Unpack an archive into an existing local folder. At most 24 MiB of the archive are in memory.

    If the whole archive is in one folder named like the archive or the target, that folder is left out. Permissions and
    times are not restored, except the executable bit. Links may point to files and folders in the folder.

    The event loop must not depend on the threads of the pool, on one of which ``progress`` is called with the bytes of
    the archive read since the last call. The archive must not replace the file ``keep`` in the folder.
    """
    from granular.aio.conversion.unpack import UnpackFolder, untar, unzip  # imported late: rarely needed

    info = await source.store.content_info(source.key)
    digests = Digests(proven(info.digests), source.store.config.part_size)
    size, version = info.size, info.version
    if size:  # a read has a version in any case, if only a substitute, and the size that all reads are checked against
        first = await source.store.read(source.key, 0, 1, version)
        size, version = first.size, first.version
    archive = _Archive(source, size, version, digests, progress)
    target = UnpackFolder(f'{source}', folder, {split_name(source.name)[0], os.path.basename(folder)}, keep)

    def work() -> Unpacked:
        try:
            if kind == 'zip':
                unzip(archive, target)
            else:
                untar(archive, kind, target)
                digests.compare(info.digests, size, f'{source}')
            target.finish()
        except GranularError:
            raise
        except Exception as error:  # any kind: parsers of damaged data raise many
            if error is archive.failure:
                raise
            member = f' at {target.member!r}' if target.member else ''
            raise CorruptArchiveError(f'{source}: cannot be read as {kind}{member}: {error!r:.200}') from error
        return Unpacked(target.files, target.bytes)

    running = asyncio.ensure_future(call_in(pool, work))
    try:
        return await result_of(running)
    except BaseException:
        archive.stop()
        await asyncio.wait([running])
        raise
    finally:
        archive.stop()


class _Archive(SeekableFile):
    """The archive as a blocking file for a thread; the event loop reads it in windows, one of them ahead."""

    def __init__(self, path: Path, size: int, version: str | None, digests: Digests, progress: Progress | None) -> None:
        super().__init__(size)
        self._path = path
        self._version = version
        self._loop = asyncio.get_running_loop()
        self._digests, self._progress = digests, progress
        self._number, self._data = -1, b''
        self._ahead: dict[int, concurrent.futures.Future[list[bytes]]] = {}
        self._seen: set[int] = set()  # windows already counted: those of a zip's directory are read twice
        self._stopped = False
        self.failure: Exception | None = None  # the exception of ``progress``

    def _bytes_at(self, start: int, size: int) -> bytes | memoryview:
        if start >= self._size:
            return b''
        number, offset = divmod(start, _WINDOW)
        return memoryview(self._window(number))[offset : offset + size]

    def _window(self, number: int) -> bytes:
        if number != self._number:
            if self._stopped:
                raise InterruptedError('unpacking was cancelled')
            reading = self._ahead.pop(number, None) or self._request(number)
            for future in self._ahead.values():
                future.cancel()
            self._ahead = {number: reading}
            if number == self._number + 1 and (number + 1) * _WINDOW < self._size:
                self._ahead[number + 1] = self._request(number + 1)
            self._data = reading.result()[0]
            self._number = number
            self._ahead.pop(number, None)
            if number not in self._seen:
                self._seen.add(number)
                self._digests.add(self._data)  # meaningful for a tar only, whose windows come in order
                if self._progress is not None:
                    self._report(self._progress)
        return self._data

    def _report(self, progress: Progress) -> None:
        try:
            call_user(progress, len(self._data))
        except Exception as error:
            self.failure = error
            raise

    def _request(self, number: int) -> concurrent.futures.Future[list[bytes]]:
        start = number * _WINDOW
        reading = self._path.read_ranges([start], [min(start + _WINDOW, self._size)], version=self._version)
        return asyncio.run_coroutine_threadsafe(reading, self._loop)

    def stop(self) -> None:
        self._stopped = True
        for future in list(self._ahead.values()):
            future.cancel()
