"""Write bags: streamed while they grow, published when they are closed."""

from typing import Literal

from granular.aio.bags.output import BagOutput
from granular.aio.paths.path import Path
from granular.aio.paths.pure import AnyPath
from granular.aio.runtime.lifecycle import Publishing, ensure_open


class BagWriter(Publishing):
    """Appends records to a new bag, or to a local one of version 3.

    A bag of version 1 or 2, and any bag in a bucket, appears when it is closed. A local bag of version 3 can be read
    while it grows, up to the last flush, and be opened again to append.

    Args:
      path: the ``.bag`` file, which must not exist, except for a local bag of version 3.
      version: 1, 2 or 3. A version 2 bag with an empty record is written as version 1, which can represent it.
      resume: how to treat bytes after the last limit of a version 3 bag, as a crash leaves them. ``'check'``: check
        that the records appended next equal those bytes; ``'discard'``: drop them. In a bucket, ``'discard'`` also
        replaces a version 3 bag without a table, as a killed writer leaves it.
      checksums: write a CRC32C of each record beside the bag, for readers with ``verify``. A bag that is appended to
        and has none gets those of its existing records first, which reads all of it and is logged; a bag that has
        checksums gets them in any case.

    Example::

        async with granular.aio.BagWriter('./records.bag') as bag:
            index = await bag.append(b'first record')
    """

    def __init__(
        self, path: AnyPath, version: int = 2, resume: Literal['check', 'discard'] = 'check', checksums: bool = True
    ) -> None:
        super().__init__()
        self._output = BagOutput(Path(path), version, resume, checksums)

    def __repr__(self) -> str:
        return repr(self._output)

    def _loss(self) -> str:
        if not len(self):
            return ''
        return f'{len(self) - self._output.flushed} of its {len(self)} records are lost'

    async def _open(self) -> None:
        await ensure_open(self._output)

    async def _close(self) -> None:
        await self._output.aclose()

    async def _abort(self) -> None:
        await self._output.abort()

    @property
    def size(self) -> int:
        """Bytes of the appended records and of their table."""
        return self._output.size

    def __len__(self) -> int:
        return self._output.length

    async def append(self, record: bytes | bytearray | memoryview, flush: bool = True) -> int:
        """Append a record and return its index.

        Args:
          record: its bytes.
          flush: write to the file now. To a bucket, bytes are uploaded in parts, each as soon as it is full.

        Raises:
          InvalidArgumentError: if the record is not bytes.
          OutOfRangeError: if the bag is full, at 2**32 - 1 records.
        """
        if self._state != 'open':
            await self._ensure_open()
        async with self._turns.turn():
            return await self._output.append(record, flush)

    async def flush(self) -> None:
        """Write the appended records to the file, or to the part of the upload that is being filled."""
        if self._state != 'open':
            await self._ensure_open()
        async with self._turns.turn():
            await self._output.flush()
