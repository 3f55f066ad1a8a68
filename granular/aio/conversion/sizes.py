"""Sizes of values, which a conversion stores beside them where the format of the dataset does not tell them."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from granular.aio.conversion.file_values import JSONText, NumpyFile
from granular.errors import DecodeError, EncodeError, InvalidArgumentError
from granular.formats import decode_json
from granular.formats.codecs.audio import audio_length
from granular.formats.layout import size_key

_AUDIO: Final = ('wav', 'flac')
_MEASURED: Final = (*_AUDIO, 'array', 'json', 'msgpack', 'tree')


class Sizes:
    """The keys whose sizes are stored, each under ``size_key``.

    Args:
      keys: the keys, of audio, lists or arrays.
      types: the type of each key of the records.
      name: of the source, for errors.
    """

    def __init__(self, keys: Sequence[str], types: Mapping[str, str], name: str) -> None:
        self._name, self._kinds = name, {key: types.get(key, '') for key in keys}
        for key, kind in self._kinds.items():
            if kind not in _MEASURED:
                got = f'of type {kind!r}' if kind else f'and the records have {sorted(types)}'
                raise InvalidArgumentError(
                    f'{name}: sizes: expected a key of a type of {", ".join(_MEASURED)}, got {key!r}, {got}'
                )
            if size_key(key) in types:
                raise InvalidArgumentError(f'{name}: sizes: the records have a key {size_key(key)!r}: rename it')

    @property
    def types(self) -> dict[str, str]:
        """The types of the keys of sizes."""
        return {size_key(key): 'int' for key in self._kinds}

    def add(self, datapoint: dict[str, Any]) -> None:
        """Add the sizes of its values to a datapoint; a missing value has none, and is refused when it is written."""
        for key, kind in self._kinds.items():
            if key in datapoint:
                datapoint[size_key(key)] = self._measured(key, kind, datapoint[key])

    def _measured(self, key: str, kind: str, value: Any) -> int:
        try:
            if value is None:
                return 0
            if kind in _AUDIO:
                return audio_length(value) if isinstance(value, bytes) else len(value[0])
            if isinstance(value, tuple):  # such as samples and their rate, which are audio only if the spec says so
                raise TypeError(f'a {type(value).__name__} is stored as {kind!r}: pass the type of audio with spec')
            if isinstance(value, NumpyFile | JSONText):
                value = value.array() if isinstance(value, NumpyFile) else decode_json(value.encode())
            return len(value)
        except (DecodeError, TypeError, IndexError, KeyError) as error:
            problem = f'{self._name}: key {key!r}: expected a value with a size: {error}'
            raise EncodeError(problem, path=self._name, key=key) from error
