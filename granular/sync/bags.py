"""The sync API of :mod:`granular.aio.bags.reader` and :mod:`granular.aio.bags.writer`."""

from granular.aio.bags import reader, writer
from granular.sync.base import SyncObject, blocking, constructing, passed_on
from granular.sync.readers import Copyable, RecordReader


class BagReader(RecordReader[reader.BagReader, bytes], Copyable):
    @constructing(reader.BagReader)
    def __init__(self) -> None: ...

    version: int = passed_on(reader.BagReader.version)
    size: int = passed_on(reader.BagReader.size)


class BagWriter(SyncObject[writer.BagWriter]):
    @constructing(writer.BagWriter)
    def __init__(self) -> None: ...

    size: int = passed_on(writer.BagWriter.size)

    append = blocking(writer.BagWriter.append, immediate=True)
    flush = blocking(writer.BagWriter.flush, immediate=True)
