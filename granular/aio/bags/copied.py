"""Bags whose files are copied as they are, by the store itself where it can, in place of being written."""

from collections.abc import Collection, Mapping

from granular.aio.bags.bag import Bag
from granular.aio.bags.identity import check_files
from granular.aio.bags.output import BagOutput
from granular.aio.paths.path import Path
from granular.aio.runtime.tasks import gather
from granular.errors import ObjectChangedError, StoreError
from granular.formats.checksums import SUFFIX
from granular.formats.layout import LIMIT


async def copied_sizes(bag: Bag, checksums: bool) -> dict[str, int] | None:
    """Return the sizes of the files of an opened bag by their suffixes, with those of checksums; None if they are not
    just its records: a writer that was killed may have left more, and checksums may be missing.
    """
    path = bag.require_path()
    sizes = {'.bag': bag.datasize, '.idx': LIMIT * bag.length} if bag.version == 3 else {'.bag': bag.size}
    sizes |= {SUFFIX: 4 * bag.length} if checksums else {}
    stats = await gather([path.store.find(path.with_suffix(suffix).key) for suffix in sizes])
    found = [None if stat is None or stat.is_dir else stat.size for stat in stats]
    return sizes if found == list(sizes.values()) else None


class CopiedBag(BagOutput):
    """The files of a bag that are copied from another one, of the sizes that ``copied_sizes`` returns, when it is
    closed.
    """

    def __init__(self, path: Path, source: Bag, sizes: Mapping[str, int]) -> None:
        super().__init__(path, source.version, 'discard', False)
        self._source, self._sizes = source, sizes
        self.alone = False  # it is one of a dataset
        self._copied: dict[Path, tuple[int, str | None]] = {}  # the size and the version of each file

    async def _open(self) -> None:
        """Wait for its end: the files are copied when it is closed."""

    async def _flush(self) -> None:
        """Write nothing."""

    async def _drop(self) -> None:
        """Keep what was copied: its dataset decides."""

    @property
    def size(self) -> int:
        return sum(size for suffix, size in self._sizes.items() if suffix != SUFFIX)

    @property
    def is_winner(self) -> bool:
        return self.path in self._copied

    @property
    def published(self) -> Collection[Path]:
        return self._copied

    async def _close(self) -> None:
        source = self._source.require_path()
        for suffix, size in self._sizes.items():
            path = self.path.with_suffix(suffix)
            self._copied[path] = size, None
            await source.with_suffix(suffix).copy(path)
        await check_files(self._source.files)
        await self.verify()

    async def verify(self) -> None:
        await gather([self._verify_copy(path, *copied) for path, copied in self._copied.items()])

    async def _verify_copy(self, path: Path, size: int, version: str | None) -> None:
        stat = await path.store.find(path.key)
        if stat is None or stat.is_dir or stat.size != size:
            got = 'no such file' if stat is None else f'{stat.size} bytes'
            raise StoreError(f'{path}: expected a copy of {size} bytes of {self._source.name}, got {got}')
        if version not in (None, stat.version):
            raise ObjectChangedError(f'{path}: another program has replaced it since it was copied', path=f'{path}')
        self._copied[path] = size, stat.version

    async def remove_published(self, sole: bool) -> None:
        for path, (_, version) in self._copied.items():
            stat = await path.store.find(path.key)
            if stat is not None and version in (None, stat.version):
                await path.store.delete([path.key])
        self._copied.clear()
