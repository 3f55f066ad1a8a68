"""Encrypted columns of Parquet files whose footer is plain: found in the footer, as pyarrow ends the process at them.

The footer is a struct in Thrift's compact protocol, whose varints are those of protobuf. Integers are not interpreted.
"""

from typing import Any, Final

from granular.formats.protobuf import varint

_BYTE, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = 3, 7, 8, 9, 10, 11, 12
_BOOLS: Final = (1, 2)
_INTEGERS: Final = (4, 5, 6)
# Numbers of fields, in parquet.thrift.
_ROW_GROUPS, _COLUMNS, _CRYPTO_METADATA = 4, 1, 8


def encrypted_columns(footer: bytes) -> frozenset[int]:
    """Return the numbers of the columns that are encrypted in any row group, of a ``FileMetaData`` that pyarrow has
    parsed; raise ``ValueError``, ``IndexError``, ``KeyError`` or ``TypeError`` if it is damaged.
    """
    groups = _Reader(footer).struct()[_ROW_GROUPS]
    columns = (column for group in groups for column in enumerate(group[_COLUMNS]))
    return frozenset(number for number, column in columns if _CRYPTO_METADATA in column)


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def struct(self) -> dict[int, Any]:
        fields, number = dict[int, Any](), 0
        while head := self._byte():
            number = (number + (head >> 4) if head >> 4 else self._zigzag()) & 0xFFFF  # an int16, as in pyarrow
            kind = head & 15
            fields[number] = None if kind in _BOOLS else self._value(kind)  # a bool is in the head of its field
        return fields

    def _value(self, kind: int) -> Any:
        """Return a list, a struct, or None for the values that are skipped."""
        if kind in _INTEGERS:
            self._varint()
        elif kind == _BINARY:
            length = self._varint()
            self._at += length
        elif kind in (_LIST, _SET):
            head = self._byte()
            length = self._varint() if head >> 4 == 15 else head >> 4
            return [self._value(head & 15) for _ in range(length)]
        elif kind == _STRUCT:
            return self.struct()
        elif kind == _MAP:
            length = self._varint()
            kinds = self._byte() if length else 0
            for _ in range(length):
                self._value(kinds >> 4)
                self._value(kinds & 15)
        elif kind == _BYTE or kind in _BOOLS:
            self._at += 1
        elif kind == _DOUBLE:
            self._at += 8
        else:
            raise ValueError(f'unknown type {kind} at byte {self._at}')
        return None

    def _byte(self) -> int:
        self._at += 1
        return self._data[self._at - 1]

    def _varint(self) -> int:
        value, self._at = varint(self._data, self._at, len(self._data))
        return value

    def _zigzag(self) -> int:
        value = self._varint()
        return (value >> 1) ^ -(value & 1)
