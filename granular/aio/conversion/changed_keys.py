"""The keys of a rewrite's result: which have the records of a key of the source, and which have new values."""

import hashlib
from collections.abc import Collection, Mapping
from typing import Any

import msgpack

from granular._support.indexing import Ints
from granular.aio.conversion.dataset_sources import DatasetSources
from granular.aio.conversion.new_values import NewValues
from granular.aio.datasets.codec import Decoders, Encoders
from granular.aio.datasets.column_reads import JoinedColumn
from granular.aio.datasets.stored_columns import StoredColumn
from granular.aio.runtime.tasks import gather
from granular.aio.runtime.threads import offload
from granular.errors import InvalidArgumentError, SpecError, UnknownKeyError
from granular.formats.layout import Layout, Spec, check_spec


class ChangedKeys:
    """The keys of the result, by the key of the source that they are named after, or their own."""

    def __init__(
        self,
        sources: DatasetSources,
        values: Mapping[str, Any] | None,
        drop: Collection[str],
        rename: Mapping[str, str] | None,
        spec: Mapping[str, str] | None,
        decoders: Decoders,
    ) -> None:
        own, name = sources.spec, sources.name
        tables = {'values': values or {}, 'rename': rename or {}, 'spec': spec or {}}
        for argument, table in tables.items():
            if not isinstance(table, Mapping):
                raise InvalidArgumentError(f'{argument}: expected a mapping by key, got {type(table).__name__}')
        values, rename, spec = tables.values()
        if isinstance(drop, str) or not isinstance(drop, Collection):
            raise InvalidArgumentError(f'drop: expected a list of keys such as {list(own)[:1]}, got {drop!r:.100}')
        for argument, keys in (('drop', drop), ('rename', rename)):
            if unknown := [key for key in keys if key not in own]:
                raise UnknownKeyError(f'{argument}: {unknown} are no keys of {name}, which has {list(own)}')
        if both := sorted(set(drop).intersection([*values, *rename])):
            raise InvalidArgumentError(f'drop: {both} are dropped, and named by values or rename')
        if stored := sorted(spec.keys() - values.keys()):
            raise InvalidArgumentError(
                f'spec: {stored} have no new values, and records are copied as they are stored: pass values for them'
            )
        self.origins: dict[str, str] = {rename.get(key, key): key for key in own if key not in drop}
        added = [key for key in values if key not in own]
        if len(self.origins) < len(own) - len(set(drop)) or self.origins.keys() & set(added):
            raise SpecError(f'rename: two keys of {name} would have one name: {dict(rename)}, beside {list(own)}')
        if not self.origins and not added:
            raise InvalidArgumentError(f'drop: leaves no key of {name}')
        self.values: dict[str, NewValues] = {
            rename.get(key, key): NewValues(
                rename.get(key, key),
                table,
                key if key in own else None,
                spec.get(key),
                own,
                decoders,
                name,
                len(sources),
            )
            for key, table in values.items()
        }
        self.spec: Spec = {}

    @property
    def read(self) -> set[str]:
        """The keys of the source that are read for new values."""
        return {key for new in self.values.values() for key in new.keys}

    async def infer(self, sources: DatasetSources, sample: Ints, layout: Layout, encoders: Encoders) -> list[str]:
        """Complete the spec, with types inferred from some datapoints. Return a digest of the new values of each."""
        check_spec(dict.fromkeys({**self.origins, **self.values}, 'bytes'), layout)  # the names of the keys
        records = await sources.fetch(sample, self.read)
        types = {target: sources.spec[origin] for target, origin in self.origins.items()}
        computed = {target: await new.fetch(sample, records) for target, new in self.values.items()}
        types |= {target: new.infer(computed[target], layout, encoders) for target, new in self.values.items()}
        self.spec = check_spec(types, layout)
        if not self.values:
            return []
        encoded = await offload(self._encode, computed, records, sample)
        rows = zip(*encoded.values(), strict=True)
        return [hashlib.sha256(msgpack.packb(row)).hexdigest()[:16] for row in rows]

    async def new_columns(
        self, targets: Collection[str], indices: Ints, columns: Mapping[str, JoinedColumn]
    ) -> dict[str, StoredColumn]:
        """Return the records of the new values of some keys, given what is read for them."""
        out: dict[str, StoredColumn] = {}
        one_by_one = []
        for target in targets:
            if (rows := self.values[target].rows(indices)) is None:
                one_by_one.append(target)
            else:
                out[target] = JoinedColumn(await offload(rows))
        if not one_by_one:
            return out
        wanted = {key for target in one_by_one for key in self.values[target].keys}
        records = {key: columns[key].by_datapoint() for key in wanted if key in columns}
        fetched = await gather([self.values[target].fetch(indices, records) for target in one_by_one])
        computed = dict(zip(one_by_one, fetched, strict=True))
        for target, values in computed.items():
            if len(values) != len(indices):
                raise InvalidArgumentError(
                    f'values[{target!r}]: its source returned {len(values)} values for {len(indices)} indices'
                )
        return {**out, **await offload(self._encode, computed, records, indices)}

    def _encode(
        self, computed: Mapping[str, list[Any]], records: Mapping[str, list[Any]], indices: Ints
    ) -> dict[str, list[Any]]:
        out = {}
        for target, values in computed.items():
            new = self.values[target]
            stored = [] if new.origin is None else records.get(new.origin, [])
            out[target] = new.encode(values, indices, stored)
        return out

    def digests(self) -> dict[str, str]:
        """Return a digest of the tables of new values, by key."""
        return {target: new.digest() for target, new in self.values.items()}
