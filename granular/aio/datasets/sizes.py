"""The sizes of the values of a key, by the tables of a dataset, or by a key that has them."""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from granular import formats
from granular._support.indexing import Ints, integers_of
from granular.aio.datasets.array_table import ArrayTable, record_sizes
from granular.aio.datasets.codec import raw
from granular.aio.datasets.columns import Columns
from granular.aio.stores.fanout import retry_if_corrupt
from granular.errors import InvalidArgumentError
from granular.formats.layout import size_key

_PAGE: Final = 1 << 20  # integers that are read at a time


async def read_sizes(reader: Any, shards: Sequence[Columns], key: str) -> Ints:
    """Return the size of a value in each datapoint of an open reader, whose datasets or shards are these."""
    (choice,) = shards[0].choose((key,))
    field = choice.field
    if field.many or field.kind == 'utf8' or (field.fn is raw and field.kind != 'array'):
        return (await retry_if_corrupt(shards[0].is_remote, lambda: record_sizes(shards, key)))[1]
    if field.kind == 'array':
        table = await ArrayTable.read(shards, key)
        await retry_if_corrupt(shards[0].is_remote, table.check_last)
        return table.counts
    if shards[0].spec.get(own := size_key(key)) == 'int':
        return await _read_integers(reader, own)
    raise InvalidArgumentError(
        f'{reader.directory}: the sizes of key {key!r}, of type {field.kind!r}, are not known: write them as a key '
        f"{own!r} of type 'int', as convert(..., sizes={key!r}) does, or pass the name of another key as sizes="
    )


async def _read_integers(reader: Any, key: str) -> Ints:
    """Return the values of a key of type ``int``, which lie together: a shard takes one request."""
    numbers = [np.zeros(0, np.int64)]
    for start in range(0, len(reader), _PAGE):
        page = await reader.fetch(range(start, min(start + _PAGE, len(reader))), (key,))
        values = [datapoint[key] for datapoint in page]
        if isinstance(values[0], bytes):  # of a reader without decoders
            values = [formats.decoders['int'](value) for value in values]
        numbers.append(integers_of(values, f'{reader.directory}: key {key!r}'))
    return np.concatenate(numbers)
