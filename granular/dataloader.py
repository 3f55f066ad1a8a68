"""The DataLoader of programs that block."""

from granular.aio.pipeline.dataloader import Operations
from granular.mapdataset import DatasetIterator, IterDataset


class DataLoader(Operations):
    __doc__ = Operations.__doc__
    _kind = IterDataset

    def __iter__(self) -> DatasetIterator:
        return DatasetIterator(self._dataset._stream)
