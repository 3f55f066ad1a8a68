"""Parses the headers of tar files into an index of members, grouped into datapoints as in WebDataset.

Headers are those of POSIX ustar, pax and GNU tar (https://www.gnu.org/software/tar/manual/html_node/Standard.html),
each parsed by Python's ``tarfile``. This module does no I/O.
"""

import dataclasses
import re
import tarfile
from collections.abc import Sequence
from typing import Final

import numpy as np

from granular._support.indexing import Ints
from granular._support.text import logger
from granular.aio.datasources.scanning import SCAN, FileIndex, HeaderScanner
from granular.config import MiB
from granular.errors import CorruptError, UnsupportedError

BLOCK: Final = 512
# The rule of WebDataset: the folder and the name up to its first dot are the key, the rest is the field.
_NAME: Final = re.compile(r'((?:.*/)?[^./]+)\.([^/]*)', re.DOTALL)
_META: Final = re.compile(r'__[^/]*__($|/)')
_PAX: Final = re.compile(rb'(\d+) ([^=]+)=')
_MAX_HEADER: Final = MiB  # limit on the bytes of a header that names another member
_COMPRESSED: Final = {b'\x1f\x8b': 'gzip', b'BZh': 'bzip2', b'\xfd7zXZ\0': 'xz', b'\x28\xb5\x2f\xfd': 'zstd'}


@dataclasses.dataclass(frozen=True, eq=False)
class Index(FileIndex):
    keys: bytes  # the keys of all datapoints, concatenated
    # For each datapoint: the end of its key in ``keys``, and the number of members up to its end.
    key_stops: Ints
    stops: Ints
    fields: Sequence[str]  # names
    # For each member: the index of its field, the position of its bytes, and their number.
    field: Ints
    starts: Ints
    sizes: Ints

    def __post_init__(self) -> None:
        datapoints, members = len(self.stops), len(self.field)
        if not len(self.key_stops) == datapoints or not members == len(self.starts) == len(self.sizes):
            raise ValueError('expected tables of equal lengths')
        last = (self.stops[-1], self.key_stops[-1]) if datapoints else (0, 0)
        if last != (members, len(self.keys)) or (np.diff(self.stops) < 0).any():
            raise ValueError('expected increasing positions up to the lengths of the tables')
        bad = (self.field < 0) | (self.field >= len(self.fields))
        bad |= (self.starts < 0) | (self.starts + self.sizes > self.size)
        if bad.any():
            raise ValueError('expected fields and byte ranges within their limits')

    @property
    def length(self) -> int:
        return len(self.stops)

    def limits(self, members: Ints) -> tuple[Ints, Ints]:
        """Return where the bytes of some members begin and end."""
        starts = self.starts[members]
        return starts, starts + self.sizes[members]

    def key(self, datapoint: int) -> str:
        start = int(self.key_stops[datapoint - 1]) if datapoint else 0
        return self.keys[start : int(self.key_stops[datapoint])].decode('utf-8', 'surrogateescape')


class Scanner(HeaderScanner[Index]):
    kind = 'tar'

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._wide = False  # True if a header was longer than what was read
        self._next_name: str | None = None  # of the next member, if a header of its own has it
        self._next_size: int | None = None
        self._keys: list[bytes] = []
        self._stops: list[int] = []
        self._fields: dict[str, int] = {}
        self._members: list[tuple[int, int, int]] = []
        self._current: set[int] = set()  # fields of the current datapoint

    def reach(self) -> int:
        return SCAN if self._wide else super().reach()

    def feed(self, start: int, data: bytes, size: int) -> None:
        if start == 0:
            self._check_kind(data, size)
        stop = start + len(data)
        while not self.done and self.at + BLOCK <= stop:
            at = self.at
            block = data[at - start : at - start + BLOCK]
            if not any(block):
                self.done = True
                return
            header = self._parse(block, at)
            body = at + BLOCK
            length = header.size if self._next_size is None or header.type in _DESCRIBING else self._next_size
            if header.type in _WITHOUT_BODY:
                length = 0  # whatever their header says
            if length < 0 or body + length > size:
                raise CorruptError(
                    f'{self._name}: is truncated: member {header.name!r} at byte {at} has {length} bytes, the file '
                    f'{size}'
                )
            if header.type in _DESCRIBING:
                if length > _MAX_HEADER:
                    raise CorruptError(
                        f'{self._name}: expected a header of at most {_MAX_HEADER} bytes at byte {at}, got {length}'
                    )
                if body + length > stop:
                    self._wide = at == start
                    return  # the next read begins here
                self._parse_description(header.type, data[body - start : body - start + length], at)
            else:
                if header.issparse() or header.type == tarfile.GNUTYPE_SPARSE:
                    raise UnsupportedError(f'{self._name}: member {header.name!r} is stored sparse')
                name = self._next_name or header.name
                if header.isreg():
                    self._add(name, body, length, at)
                self._next_name = self._next_size = None
                self.count += 1
            self.at = body + -(-length // BLOCK) * BLOCK
            self._wide = False
        if not self.done and self.at + BLOCK > size:
            if self.at < size:
                raise CorruptError(f'{self._name}: is truncated: its last header has {size - self.at} of {BLOCK} bytes')
            logger.warning('%s: has no end marker: it may have been truncated after member %d', self._name, self.count)
            self.done = True

    def index(self, size: int, version: str | None) -> Index:
        if self._keys:
            self._stops.append(len(self._members))
        members = np.array(self._members, np.int64).reshape(-1, 3).T
        lengths = np.array([len(key) for key in self._keys], np.int64)
        return Index(
            size, version, b''.join(self._keys), np.cumsum(lengths, dtype=np.int64), np.array(self._stops, np.int64),
            tuple(self._fields), *map(np.ascontiguousarray, members),
        )  # fmt: skip

    def _check_kind(self, data: bytes, size: int) -> None:
        for magic, kind in _COMPRESSED.items():
            if data.startswith(magic):
                raise UnsupportedError(
                    f'{self._name}: is compressed by {kind}: its members cannot be read by range: decompress it'
                )
        if size < BLOCK:
            raise CorruptError(f'{self._name}: is not a tar file, or is truncated: it has {size} bytes')

    def _parse(self, block: bytes, at: int) -> tarfile.TarInfo:
        try:
            return tarfile.TarInfo.frombuf(block, 'utf-8', 'surrogateescape')
        except tarfile.HeaderError as error:
            raise CorruptError(f'{self._name}: expected a tar header at byte {at}: {error}') from None

    def _parse_description(self, kind: bytes, body: bytes, at: int) -> None:
        if kind == tarfile.GNUTYPE_LONGNAME:
            self._next_name = body.rstrip(b'\0').decode('utf-8', 'surrogateescape')
            return
        for key, value in self._pax_records(body, at) if kind in _PAX_TYPES else ():
            if key.startswith(b'GNU.sparse'):
                raise UnsupportedError(f'{self._name}: the member at byte {at} is stored sparse')
            if kind == tarfile.XGLTYPE:
                continue  # applies to all following members, such as a comment: a name or size would make no sense
            if key == b'path':
                self._next_name = value.decode('utf-8', 'surrogateescape')
            elif key == b'size':
                if not value.isdigit() or len(value) > 18:
                    raise CorruptError(
                        f'{self._name}: the header at byte {at} has a size of {len(value)} characters, {value!r:.40}'
                    )
                self._next_size = int(value)

    def _pax_records(self, body: bytes, at: int) -> list[tuple[bytes, bytes]]:
        records, position = [], 0
        while position < len(body) and body[position]:
            match = _PAX.match(body, position)
            stop = position + int(match[1][:8]) if match else 0
            if match is None or not match.end() < stop <= len(body) or body[stop - 1 : stop] != b'\n':
                raise CorruptError(f'{self._name}: the pax header at byte {at} is damaged')
            records.append((match[2], body[match.end() : stop - 1]))
            position = stop
        return records

    def _add(self, name: str, start: int, size: int, at: int) -> None:
        match = _NAME.fullmatch(name)
        if match is None or _META.match(name):
            return
        key, field = match[1].encode('utf-8', 'surrogateescape'), match[2].lower()
        number = self._fields.setdefault(field, len(self._fields))
        if not self._keys or self._keys[-1] != key:
            if self._keys:
                self._stops.append(len(self._members))
            self._keys.append(key)
            self._current = set()
        if number in self._current:
            raise CorruptError(f'{self._name}: datapoint {match[1]!r} has {field!r} twice, the second at byte {at}')
        self._current.add(number)
        self._members.append((number, start, size))


_PAX_TYPES: Final = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE)
# Links, folders and devices, as for tarfile: members of types that it does not know have a body.
_WITHOUT_BODY: Final = (
    tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE,
)  # fmt: skip
_DESCRIBING: Final = (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, *_PAX_TYPES)
