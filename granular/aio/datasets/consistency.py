"""Check that opened files belong to one dataset, of which no file was replaced while it was being opened.

Writers remove ``spec.json`` before they replace any other file, and publish it after all others. So if it is the same
before the first bag is opened and after the last one, all bags belong to one dataset.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from granular.aio.bags.identity import FileIdentity, check_files
from granular.aio.http.messages import http_date
from granular.aio.http.reply import Reply, changed
from granular.aio.paths.path import Path
from granular.aio.runtime.tasks import gather
from granular.errors import CorruptError, NotFoundError, ObjectChangedError

Files = Sequence[tuple[Path, FileIdentity]]

_ATTEMPTS: Final = 3
_SETTLED: Final = 5.0  # seconds between a file's last change and its first read; store clocks have whole seconds


class OpenedSpec:
    """The ``spec.json`` of a dataset, as read before its bags were opened.

    A ``spec.json`` that is rewritten with the same keys has the same content-based ETag, and modification times have
    whole seconds. So if it was written within the last 5 seconds, the versions of all bags are checked as well, after
    the spec: this shows that all of them existed at that moment. It takes one request per file. Otherwise the check
    takes one request, or two if the references were requested together with the spec, to save a round trip.
    """

    def __init__(self, directory: Path, first: Reply) -> None:
        self._path = directory / 'spec.json'
        self.first = first
        self._local = directory.store.local
        self._settled = not directory.store.versions_repeat or _age(first) > _SETTLED

    async def check(self, refs: Files, bags: Files) -> None:
        """Check that the dataset is unchanged, given the files of its references, if these were requested together with
        the spec, and those of its other bags. Raise ``ObjectChangedError`` if it was replaced, and ``NotFoundError`` if
        it was removed.
        """
        if self._local:  # on a disk, the references are opened after the spec
            await self._check_spec()
        elif self._settled:
            await gather([self._check_spec(), check_files(refs)])
        else:
            await self._check_spec()
            await check_files([*bags, *refs])

    async def _check_spec(self) -> None:
        now = await self._path.store.read(self._path.key)
        before = self.first
        if (now.data, now.version, now.modified) != (before.data, before.version, before.modified):
            both = ((before.version, now.version), (before.modified, now.modified), (str(before.data), str(now.data)))
            raise changed(f'{self._path}', *next((f'{old}', new) for old, new in both if old != new))


def _age(reply: Reply) -> float:
    """Return the seconds since an object was last written, by the clock of its store; 0 if unknown."""
    date, modified = http_date(reply.date), http_date(reply.modified)
    return 0.0 if date is None or modified is None else (date - modified).total_seconds()


async def open_as_one(
    name: str, open_once: Callable[[], Awaitable[None]], check_unchanged: Callable[[], Awaitable[None]]
) -> None:
    """Open a dataset, and retry if it was replaced meanwhile. An error of opening is raised if it was not replaced.

    ``check_unchanged`` raises an ObjectChangedError or a NotFoundError if it was replaced since ``open_once`` began;
    the former is raised if that is so in each of 3 attempts.
    """
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            failure = await _failure_of(open_once)
            await check_unchanged()
        except (ObjectChangedError, NotFoundError) as error:
            if attempt == _ATTEMPTS:
                raise ObjectChangedError(
                    f'{name}: was replaced while it was being opened, {_ATTEMPTS} times in a row: {error}'
                ) from error
            continue
        if failure is not None:
            try:
                raise failure
            finally:
                del failure  # whose traceback refers to this frame
        return


async def _failure_of(open_once: Callable[[], Awaitable[None]]) -> Exception | None:
    try:
        await open_once()
    except (CorruptError, NotFoundError) as error:
        return error
    return None
