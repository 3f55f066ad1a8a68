"""Records of a bag as Python reads them without a library for it: a request for each, over a connection per thread."""

import http.client
import io
import threading
import urllib.parse
from collections.abc import Sequence
from typing import Any

import numpy as np


class Records:
    """The values in ranges of an object: images, decoded by Pillow, or rows of 4,096 tokens."""

    def __init__(self, url: str, ranges: Sequence[tuple[int, int]], key: str) -> None:
        self._url, self._ranges, self._key = url, ranges, key
        self._local: threading.local | None = None

    def __len__(self) -> int:
        return len(self._ranges)

    def read(self, index: int) -> bytes:
        """Return the bytes of a range."""
        url = urllib.parse.urlsplit(self._url)
        self._local = self._local or threading.local()
        connection = getattr(self._local, 'connection', None)
        if connection is None:
            connection = self._local.connection = http.client.HTTPConnection(url.netloc)
        start, stop = self._ranges[index]
        connection.request('GET', url.path, headers={'Range': f'bytes={start}-{stop - 1}'})
        body: bytes = connection.getresponse().read()
        if len(body) != stop - start:
            raise RuntimeError(f'{self._url}: expected {stop - start} bytes, got {len(body)}')
        return body

    def __getitem__(self, index: int) -> Any:
        body = self.read(index)
        if self._key == 'tokens':
            return np.frombuffer(body, np.int32, 4096, len(body) - 4 * 4096)  # behind the header of the array
        from PIL import Image

        return np.asarray(Image.open(io.BytesIO(body)).convert('RGB'))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, '_local': None}
