"""The DataLoader of the sync API."""

from granular.aio.pipeline.data_loader import Operations
from granular.sync.pipeline import DatasetIterator, IterDataset


class DataLoader(Operations):
    __doc__ = Operations.__doc__
    _kind = IterDataset

    def __iter__(self) -> DatasetIterator:
        return DatasetIterator(self._dataset._stream)
