"""Datasets as sources of a conversion: their records are copied as they are stored."""

from collections.abc import Mapping, Sequence
from typing import Any

from granular import formats
from granular.aio.conversion.infer import mean_size
from granular.aio.datasets.codec import Decoders, Field, check_decoders, raw
from granular.aio.datasets.reader import DatapointReader, fetch_stored, fields_read
from granular.aio.pipeline.nodes.adapters import Fetching, convert
from granular.aio.pipeline.nodes.source import Node, Source
from granular.aio.runtime.lifecycle import ensure_open
from granular.errors import InvalidArgumentError, UnknownKeyError
from granular.formats.layout import Layout, Spec, check_spec, element

_VALUES = 'pass granular.MapDataset.source(reader), of which values are converted'


def is_stored(reader: Any) -> bool:
    """Return whether an object is a reader of a dataset without decoders other than those of granular."""
    if not isinstance(reader, DatapointReader):
        return False
    return all(
        field.fn is raw or field.fn is formats.decoders.get(element(field.kind)) for field in fields_read(reader)
    )


class StoredRecords:
    """The records of an open reader, as mappings from keys to bytes, or lists of these, which need no encoders."""

    def __init__(self, reader: DatapointReader[Any]) -> None:
        self.reader = reader

    def __len__(self) -> int:
        return len(self.reader)

    async def fetch(self, indices: Any) -> list[dict[str, Any]]:
        return await fetch_stored(self.reader, indices)


async def stored_records(node: Source) -> tuple[Source, list[DatapointReader[Any]]] | None:
    """Return the records, as they are stored, of a pipeline that only chooses among the datapoints of readers of
    datasets of one spec, and these readers; None for any other.
    """
    readers: list[DatapointReader[Any]] = []
    records = await _stored_node(node, readers)
    if records is None or any(reader.spec != readers[0].spec for reader in readers):
        return None
    return records, readers


async def _stored_node(node: Source, readers: list[DatapointReader[Any]]) -> Source | None:
    if isinstance(node, Node):
        if not node.selects:
            return None
        parents = [await _stored_node(parent, readers) for parent in node.parents]
        return None if None in parents else node.copy_over(*(parent for parent in parents if parent is not None))
    reader = node.root if isinstance(node, Fetching) else None
    if not isinstance(reader, DatapointReader):
        return None
    await ensure_open(reader)
    if not is_stored(reader) or not _has_all_keys(node, reader):
        return None
    readers.append(reader)
    return convert(StoredRecords(reader))


def _has_all_keys(node: Source, reader: DatapointReader[Any]) -> bool:
    """Return whether no earlier select has chosen some keys of a reader."""
    try:
        node.select(list(reader.spec))
    except UnknownKeyError:
        return False
    return True


class StoredMapping:
    """The ``RecordMapping`` of the records of a dataset to the datapoints of another one, which has the same spec."""

    def __init__(
        self,
        reader: DatapointReader[Any],
        sample: Sequence[Any],
        spec: Mapping[str, str] | None,
        layout: Layout,
        sizes: str | Sequence[str] = (),
    ) -> None:
        self.spec: Spec = check_spec(reader.spec, layout)
        if sizes:
            raise InvalidArgumentError(
                f'{reader.directory}: sizes: its records are copied as they are stored: {_VALUES}'
            )
        if other := {key: kind for key, kind in (spec or {}).items() if self.spec.get(key) != kind}:
            raise InvalidArgumentError(
                f'{reader.directory}: its records are copied as they are stored, with the spec {self.spec}, not with '
                f'{other}: {_VALUES}'
            )
        self.reasons = dict.fromkeys(self.spec, 'of the dataset')
        self.renamed: dict[str, str] = {}
        self.hints: dict[str, str] = {}
        self.mean: int = mean_size(sample)

    def refuse_bad(self, sample: Sequence[Any]) -> None:
        """Accept all records."""

    def encoders(self, custom: Mapping[str, Any] | None) -> None:
        """Return that no encoders are needed; raise ``InvalidArgumentError`` for those of the user."""
        if custom:
            raise InvalidArgumentError(f'encoders: the records of a dataset are copied as they are stored: {_VALUES}')

    def datapoint(self, record: dict[str, Any]) -> dict[str, Any]:
        return record


def checks_of(fields: Sequence[Field], decoders: Decoders, reader: DatapointReader[Any] | None) -> list[Field]:
    """Return the fields with the decoders that must accept each record, by default those of the reader."""
    if decoders is None:
        return [] if reader is None else fields_read(reader)
    functions = check_decoders(decoders)
    return [field._replace(fn=functions.get(element(field.kind)) or raw) for field in fields]
