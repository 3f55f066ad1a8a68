"""Encrypted columns of Parquet files whose footer is plain: found in the footer, as pyarrow ends the process at them.

The footer is a struct in Thrift's compact protocol. Only the fields on the way to the columns are interpreted.
"""

from collections.abc import Iterator
from typing import Final

from granular.formats.protobuf import Message

_BYTE, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = 3, 7, 8, 9, 10, 11, 12
_BOOLS: Final = (1, 2)
_INTEGERS: Final = (4, 5, 6)
# Numbers of fields, in parquet.thrift.
_ROW_GROUPS, _COLUMNS, _CRYPTO_METADATA = 4, 1, 8


def encrypted_columns(footer: bytes) -> frozenset[int]:
    """Return the numbers of the columns that are encrypted in any row group, of a ``FileMetaData`` that pyarrow has
    parsed.

    Raises:
      ValueError, IndexError: if it is damaged.
    """
    reader = _Reader(footer)
    found: set[int] = set()
    for field, kind in reader.fields():
        if field != _ROW_GROUPS:
            reader.skip(kind)
            continue
        for _ in range(reader.list_length()):
            for part, part_kind in reader.fields():
                if part != _COLUMNS:
                    reader.skip(part_kind)
                    continue
                for number in range(reader.list_length()):
                    for detail, detail_kind in reader.fields():
                        if detail == _CRYPTO_METADATA:
                            found.add(number)
                        reader.skip(detail_kind)
    return frozenset(found)


class _Reader:
    """Reads a struct from its first byte on."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0
        self._message = Message(data, 'Thrift', ValueError)

    def fields(self) -> Iterator[tuple[int, int]]:
        """Yield the number and type of each field of a struct; the caller reads or skips its value."""
        number = 0
        while head := self._byte():
            number = (number + (head >> 4) if head >> 4 else self._zigzag()) & 0xFFFF  # an int16, as in pyarrow
            yield number, head & 15

    def list_length(self) -> int:
        """Read the head of a list of structs; raise ``ValueError`` if it is another list."""
        length, kind = self._list_head()
        if kind != _STRUCT:
            raise ValueError(f'expected a list of structs, got type {kind} at byte {self._at}')
        return length

    def skip(self, kind: int) -> None:
        """Skip a value."""
        if kind in _INTEGERS:
            self._varint()
        elif kind == _BINARY:
            length = self._varint()
            self._at += length
        elif kind in (_LIST, _SET):
            length, element = self._list_head()
            for _ in range(length):
                self._skip_element(element)
        elif kind == _STRUCT:
            for _, field_kind in self.fields():
                self.skip(field_kind)
        elif kind == _MAP:
            length = self._varint()
            kinds = self._byte() if length else 0
            for _ in range(length):
                self._skip_element(kinds >> 4)
                self._skip_element(kinds & 15)
        elif kind in (_BYTE, _DOUBLE):
            self._at += 1 if kind == _BYTE else 8
        elif kind not in _BOOLS:  # a bool is in the head of its field
            raise ValueError(f'unknown type {kind} at byte {self._at}')

    def _skip_element(self, kind: int) -> None:
        self.skip(_BYTE if kind in _BOOLS else kind)

    def _list_head(self) -> tuple[int, int]:
        head = self._byte()
        return (self._varint() if head >> 4 == 15 else head >> 4), head & 15

    def _byte(self) -> int:
        self._at += 1
        return self._data[self._at - 1]

    def _varint(self) -> int:
        value, self._at = self._message.varint(self._at, len(self._data))
        return value

    def _zigzag(self) -> int:
        value = self._varint()
        return (value >> 1) ^ -(value & 1)
