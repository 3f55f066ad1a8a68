"""Contents of files, which are stored as values of their types."""

from typing import Any

import numpy as np

from granular.errors import DecodeError, EncodeError
from granular.formats.codecs.arrays import decode_npy


class JSONText(str):
    """The content of a JSON file, which is stored as it is."""

    __slots__ = ()


class NumpyFile(bytes):
    """A file of ``numpy.save``, which is stored as an array, or as it is in a key of type ``bytes``."""

    __slots__ = ()

    def array(self) -> np.ndarray[Any, Any]:
        try:
            return decode_npy(self)
        except DecodeError as error:
            raise EncodeError(f'{error}') from error
