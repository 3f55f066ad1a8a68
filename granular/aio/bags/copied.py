"""Bags whose files are copied as they are, by the store itself where it can, in place of being written."""

from collections.abc import Mapping

from granular.aio.bags.bag import Bag
from granular.aio.bags.identity import check_files
from granular.aio.bags.output import BagOutput
from granular.aio.paths.path import Path
from granular.aio.runtime.tasks import gather
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

    async def _open(self) -> None:
        """Wait for its end: the files are copied when it is closed."""

    async def _flush(self) -> None:
        """Write nothing."""

    async def _drop(self) -> None:
        """Keep what was copied: its dataset decides."""

    @property
    def size(self) -> int:
        return sum(size for suffix, size in self._sizes.items() if suffix != SUFFIX)

    async def _close(self) -> None:
        source = self._source.require_path()
        for suffix, size in self._sizes.items():
            path = self.path.with_suffix(suffix)
            self._note_published(path, size)  # before, as a copy that fails may be carried out
            await source.with_suffix(suffix).copy(path)
        await check_files(self._source.files)
        await self.verify()
