"""The proof that what was opened is one dataset, of which nothing was replaced between its first and its last file.

Writers remove ``spec.json`` before they replace anything else, and publish it after all else is there. So if it is the
same before the first bag is opened and after the last one, all bags are of one dataset.
"""

import email.utils
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from granular.aio.bags.reader import BagReader
from granular.aio.http.reply import Reply, changed
from granular.aio.paths.path import Path
from granular.aio.runtime.loops import gather
from granular.errors import CorruptError, NotFoundError, ObjectChangedError

_ATTEMPTS: Final = 3
_SETTLED: Final = 5.0  # seconds between the last change of a file and its first reading; clocks tell whole seconds


class Proof:
    """What was there before the bags of a dataset were opened.

    An ETag made of the content is the same for a ``spec.json`` that was written again with the same keys, and the time
    of its change tells whole seconds. So where it was written within the last seconds, the bags must be the same once
    more after it was seen again: each was there, then, at that moment. That is a request for each file, and otherwise
    it is one, or two where the references were asked for beside the spec, to spare a round trip.

    Args:
      directory: the dataset's folder.
      first: its ``spec.json``.
    """

    def __init__(self, directory: Path, first: Reply) -> None:
        self._place = directory / 'spec.json'
        self._first = first
        self._local = directory.store.local
        self._settled = not directory.store.versions_repeat or _age(first) > _SETTLED

    async def check(self, refs: BagReader | None, bags: Sequence[BagReader]) -> None:
        """That the dataset is what it was.

        Raises:
          ObjectChangedError: if it was replaced.
          NotFoundError: if it was removed.
        """
        if self._local:  # where the references are opened behind the spec
            await self._check_spec()
        elif self._settled:
            await gather([self._check_spec(), *([] if refs is None else [refs.check_versions()])])
        else:
            await self._check_spec()
            await gather([bag.check_versions() for bag in (*bags, *([] if refs is None else [refs]))])

    async def _check_spec(self) -> None:
        now = await self._place.store.read(self._place.key)
        if (now.data, now.version, now.modified) != (self._first.data, self._first.version, self._first.modified):
            before = self._first.version or self._first.modified
            raise changed(f'{self._place}', before, now.version or now.modified)


def _age(reply: Reply) -> float:
    """Seconds since an object was last written, by the clock of its store; 0 if the store does not say."""
    try:
        date, modified = (email.utils.parsedate_to_datetime(text) for text in (reply.date, reply.modified))
        return (date - modified).total_seconds()
    except (ValueError, TypeError, OverflowError):
        return 0.0


async def open_as_one(name: str, once: Callable[[], Awaitable[None]], prove: Callable[[], Awaitable[None]]) -> None:
    """Open something until it is proven to be one; an error of opening it stands if it was not replaced meanwhile.

    Args:
      name: for the error.
      once: opens it.
      prove: raises an ObjectChangedError or a NotFoundError if it was replaced since ``once`` began.

    Raises:
      ObjectChangedError: if it was replaced each time.
    """
    for attempt in range(1, _ATTEMPTS + 1):
        failed: Exception | None = None
        try:
            try:
                await once()
            except (CorruptError, NotFoundError) as error:
                failed = error
            await prove()
        except (ObjectChangedError, NotFoundError) as error:
            if attempt == _ATTEMPTS:
                raise ObjectChangedError(
                    f'{name}: it was replaced while it was being opened, {_ATTEMPTS} times in a row: {error}'
                ) from error
            continue
        if failed is not None:
            raise failed
        return
